// Package forecast predicts the capacities of a study's points with the simulator. It scales the simulator's profile to
// the first measurements of the study. It never measures a server, and its capacities never win a study.
package forecast

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"
	"golang.org/x/sync/errgroup"

	"vllmtuner/render"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/simload"
	"vllmtuner/tuner/calibrate"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// pointCount is the number of predicted points that fill the space, besides Forecaster.First and the promising ones. The
// sampler's model interpolates between them.
const pointCount = 96

// A Forecaster predicts the capacities of one study.
type Forecaster struct {
	Profiles  []*sim.Profile       // tried one after the other; the one that agrees best with the measurements predicts
	Runner    func() *trial.Runner // returns a Runner with the settings of the study
	Space     *space.Space
	FixedArgs []string      // args of every trial
	First     []space.Point // points that are predicted in any case, such as the current args
	Seed      uint64

	points  int            // number of points that fill the space, besides First
	longRun *trial.LongRun // long run of the workload, built when first needed
}

// runner returns a Runner of the study. All these Runners share one long run.
func (f *Forecaster) runner() *trial.Runner {
	r := f.Runner()
	r.LongRun = f.longRun
	f.longRun = r.SharedLongRun()
	return r
}

// New returns a Forecaster for a plan, or nil if the simulator cannot predict its study. A study of a simulated server
// is predicted with the other profiles, because the server's own profile would know the answers.
func New(p *plan.Plan) (*Forecaster, error) {
	if p.File.NoPrediction() != "" {
		return nil, nil
	}
	f := &Forecaster{Runner: p.Runner, Space: p.Search.Space, FixedArgs: p.File.Server.Args, Seed: p.File.Sampler.Seed, points: pointCount}
	if len(p.Search.Current) > 0 {
		f.First = []space.Point{p.Search.Current}
	}
	names := []string{p.File.Prior.Profile}
	if names[0] == "" {
		names = slices.DeleteFunc(sim.ProfileNames(), func(name string) bool {
			return strings.HasSuffix(name, emptied) || name == strings.TrimSuffix(p.File.Server.Simulate, emptied)
		})
	}
	for _, name := range names {
		profile, err := sim.LoadProfile(name)
		if err != nil {
			return nil, err
		}
		f.Profiles = append(f.Profiles, profile)
	}
	return f, nil
}

// emptied is the last part of the names of some profiles. Such a profile differs from the profile without this part of
// the name only in the constants for an emptied prefix cache.
const emptied = "-reset"

// ErrNothingMeasured is returned while the study has no probe that a prediction can be compared with.
var ErrNothingMeasured = errors.New("no probe can be compared with a simulated one")

// maxMisfit is the largest misfit with which the simulator predicts. An engine that no profile resembles had misfits of
// 10 to 20 %. Six predicted studies of it ended 7 % below the best, and without predictions they ended 3 % below
// (docs/evidence/search.md). On the H200, profiles with constants off by 20 % had misfits of at most 3.2 %.
const maxMisfit = 0.1

// A MisfitError says that no profile agrees with what the study has measured.
type MisfitError struct {
	Profile string // name of the profile that agrees best
	Misfit  float64
}

// Error returns the reason for a user.
func (e *MisfitError) Error() string {
	return fmt.Sprintf("its best profile, %s, misses the measured latencies and throughputs by %s; above %s predictions would mislead the search",
		e.Profile, render.Share(e.Misfit), render.Share(maxMisfit))
}

// Priors returns the predictions as trials, and a note on them for the user.
func (f *Forecaster) Priors(ctx context.Context, study studies.Study) ([]studies.Trial, string, error) {
	forecast, err := f.Predict(ctx, study)
	if err != nil {
		return nil, "", err
	}
	note := fmt.Sprintf("the simulator predicts %s; its profile %s, scaled to %s, misses the measured latencies and throughputs by %s",
		render.Count(len(forecast.Trials), "point"), forecast.Profile, render.Count(len(study.Trials), "trial"), render.Share(forecast.Misfit))
	return forecast.Trials, note, nil
}

// A Forecast is what the simulator predicts.
type Forecast struct {
	Profile string          // name of the profile that was scaled
	Misfit  float64         // root mean square of ln(predicted / measured) over the figures of the measured probes
	Trials  []studies.Trial // each has Point, Args and Result.Capacity with Misfit as RatioErr; points that do not start in the simulator are left out
}

// Predict scales each profile to the study's measured trials, and predicts with the profile that agrees best with them.
// If even that profile misses them by more than maxMisfit, the error is a *MisfitError.
func (f *Forecaster) Predict(ctx context.Context, study studies.Study) (Forecast, error) {
	var best calibrate.Scaled
	var from *sim.Profile
	for _, p := range f.Profiles {
		runner := f.runner()
		scaled, err := calibrate.Scale(ctx, calibrate.Input{Study: study, Model: p.Model, Runner: runner, From: p})
		if _, ok := errors.AsType[*calibrate.InputError](err); ok {
			continue // the flags of the measured trials do not start with this profile
		}
		if err != nil {
			return Forecast{}, fmt.Errorf("scale the profile %s: %w", p.Name, err)
		}
		if from == nil || scaled.Misfit < best.Misfit {
			best, from = scaled, p
		}
	}
	if from == nil {
		return Forecast{}, ErrNothingMeasured
	}
	if best.Misfit > maxMisfit {
		return Forecast{}, &MisfitError{from.Name, best.Misfit}
	}
	all, err := f.spread()
	if err != nil {
		return Forecast{}, err
	}
	trials, err := f.capacities(ctx, best.Profile, all, highestRate(study))
	if err != nil {
		return Forecast{}, err
	}
	for i := range trials {
		trials[i].Result.Capacity.RatioErr = best.Misfit
	}
	return Forecast{from.Name, best.Misfit, f.withPlainBest(trials)}, nil
}

// withPlainBest puts the best predicted point, without its environment variables, before the other points. The
// simulator does not model variables, so the point without them has the same capacity. It comes first, because the
// tuner takes the first of several equally good points.
func (f *Forecaster) withPlainBest(trials []studies.Trial) []studies.Trial {
	if len(f.Space.Variables()) == 0 || len(trials) == 0 {
		return trials
	}
	best := slices.MaxFunc(trials, func(a, b studies.Trial) int { return cmp.Compare(a.Result.Capacity.Rate, b.Result.Capacity.Rate) })
	best.Point = best.Point.WithoutVariables()
	if f.Space.Check(best.Point) != nil {
		return trials
	}
	return append([]studies.Trial{best}, slices.DeleteFunc(trials, func(t studies.Trial) bool { return t.Point.String() == best.Point.String() })...)
}

// spread returns the default, the First points, and points that fill the space evenly.
func (f *Forecaster) spread() ([]space.Point, error) {
	fill, err := sampler.New("halton", f.Space, f.Seed, f.points)
	if err != nil {
		return nil, err
	}
	points := append([]space.Point{{}}, f.First...)
	var history []studies.Trial
	for len(history) < f.points {
		p, err := fill.Next(len(history), history)
		if errors.Is(err, sampler.ErrExhausted) {
			break
		}
		if err != nil {
			return nil, err
		}
		history = append(history, studies.Trial{Number: len(history), Point: p, State: studies.Done})
		points = append(points, p)
	}
	return lo.UniqBy(points, space.Point.String), nil
}

// capacities measures the points on simulated servers. All points get the same requests, so most of the error is the
// same for all points.
func (f *Forecaster) capacities(ctx context.Context, p *sim.Profile, points []space.Point, rate float64) ([]studies.Trial, error) {
	runner := f.runner()
	runner.Start = (&simload.Rig{Profile: calibrate.Quiet(p)}).Start
	runner.Source = &calibrate.Memo{Source: runner.Source}
	runner.Lengths = predictedLengths(runner.Lengths, runner.Cache, rate)
	runner.Search.Precision, runner.Search.MaxProbes, runner.WorstCase = 0, min(runner.Search.MaxProbes, maxProbes), false
	runner.KnownCache = true
	if rate > 0 {
		runner.Search.Hint = rate
	}
	first, err := f.capacity(ctx, runner, points[0])
	if err != nil {
		return nil, err
	}
	if first.Met() {
		runner.Search.Hint = first.Result.Capacity.Rate
	}
	rest, err := f.measure(ctx, runner, points[1:])
	if err != nil {
		return nil, err
	}
	all := append([]studies.Trial{first}, rest...)
	for range min(refinements, f.points/promisingPoints) {
		more, err := f.promising(all)
		if err != nil {
			return nil, err
		}
		near, err := f.measure(ctx, runner, more)
		if err != nil {
			return nil, err
		}
		all = append(all, near...)
	}
	class := first.Result.Class
	all = slices.DeleteFunc(all, func(t studies.Trial) bool {
		rate := t.Result.Capacity.Rate
		return t.Result.Outcome != trial.Measured || !(rate > 0) || math.IsInf(rate, 1)
	})
	if !slices.ContainsFunc(all, studies.Trial.Met) {
		return nil, fmt.Errorf("no point runs and keeps the SLO in the simulator; the default ends with %s", cmp.Or(string(class), "no capacity"))
	}
	return all, nil
}

// measure measures points side by side.
func (f *Forecaster) measure(ctx context.Context, runner *trial.Runner, points []space.Point) ([]studies.Trial, error) {
	all := make([]studies.Trial, len(points))
	var workers errgroup.Group
	workers.SetLimit(runtime.GOMAXPROCS(0))
	for i, p := range points {
		workers.Go(func() (err error) {
			all[i], err = f.capacity(ctx, runner, p)
			return err
		})
	}
	return all, workers.Wait()
}

const (
	// After the points that fill the space, the best ones are looked for: in each of refinements rounds, the sampler gp
	// chooses promisingPoints points from what the simulator says so far. On the simulated H200, eight studies then ended
	// 1.7 % below the best instead of 2.3 %.
	refinements, promisingPoints = 4, 8
	// predictedErr is the standard error of ln capacity that the sampler believes of simulated capacities.
	predictedErr = 0.02
)

// promising returns the points that the sampler gp would try next if the simulated capacities were measured. If no point
// of the space is left, there may be fewer.
func (f *Forecaster) promising(simulated []studies.Trial) (points []space.Point, err error) {
	chooser, err := sampler.New("gp", f.Space, f.Seed, len(simulated)+promisingPoints)
	if err != nil {
		return nil, err
	}
	history := slices.Clone(simulated)
	for i := range history {
		history[i].Number, history[i].Origin = i, studies.Sampled
		history[i].Result.Capacity.StdErr = predictedErr
	}
	for range promisingPoints {
		p, err := chooser.Next(len(history), history)
		if errors.Is(err, sampler.ErrExhausted) {
			break
		}
		if err != nil {
			return nil, err
		}
		points = append(points, p)
		history = append(history, studies.Trial{Number: len(history), Origin: studies.Sampled, State: studies.Running, Point: p})
	}
	return points, nil
}

// capacity measures one point.
func (f *Forecaster) capacity(ctx context.Context, runner *trial.Runner, point space.Point) (studies.Trial, error) {
	t := studies.Trial{Number: -1, Origin: studies.Prior, State: studies.Done, Point: point, Args: slices.Concat(f.FixedArgs, f.Space.Args(point))}
	args, _, err := calibrate.SimulatedArgs(t.Args)
	if err != nil {
		return t, fmt.Errorf("predict %s: %w", point, err)
	}
	result, err := runner.Run(ctx, trial.Task{Args: args, MaxFails: maxFails, Record: func(trial.Probe) error { return nil }})
	if err != nil {
		return t, fmt.Errorf("predict %s: %w", point, err)
	}
	t.Result = trial.Result{Outcome: result.Outcome, Class: result.Class, Capacity: result.Capacity}
	t.Result.Facts.Simulated = true
	return t, nil
}

const (
	// maxFails bounds the probes of a point that is far worse than the default.
	maxFails = 5
	// maxProbes bounds the probes of a point. The shape of the predictions needs no precision.
	maxProbes = 12
	// probeRequests is the least number of requests of a probe. It is larger than in the probes of a study, because
	// simulated requests need no GPU. With the 300 requests of a study, three slow requests decide a p99, so chance ranks
	// the points. More requests cost computing time.
	probeRequests = 800
	// minWindow is the shortest window. Most answers take less time.
	minWindow = 30 * time.Second
)

// predictedLengths returns lengths with which a probe at the given rate has at least probeRequests requests. With the
// Reset protocol, a probe never gets longer than the study's: the cache fills during the window, so a longer window
// would have another capacity.
func predictedLengths(study trial.Lengths, cache trial.Protocol, rate float64) trial.Lengths {
	l := study
	l.MinRequests = probeRequests
	if rate > 0 {
		l.Window = max(minWindow, time.Duration(probeRequests/rate*float64(time.Second)))
	}
	if cache == trial.Reset {
		l.Window, l.MinRequests = min(l.Window, study.Window), min(l.MinRequests, study.MinRequests)
	}
	return l
}

// highestRate returns the highest capacity that the study has measured; 0 if there is none.
func highestRate(study studies.Study) (rate float64) {
	for _, t := range study.Trials {
		if t.Met() {
			rate = max(rate, t.Result.Capacity.Rate)
		}
	}
	return rate
}
