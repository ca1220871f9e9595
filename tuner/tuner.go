// Package tuner has the loop of a study: choose a point, begin a trial, run it, finish it. It never talks to a server
// or a disk itself.
package tuner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// A Store keeps the study. What a call without an error has stored is kept even if the process is killed.
type Store interface {
	// History returns the trials, with all probes only where whole asks for them; see studies.Store.
	History(whole func(studies.Study) []int) (studies.Study, error)
	Begin(studies.Trial) error
	Record(number int, p trial.Probe) error
	Finish(number int, r trial.Result) error
	Served(number int, version string, change studies.Change) error
}

// A Budget limits what a study may spend.
type Budget struct {
	Trials  int           // number of trials, including the default and the current args
	MinGain float64       // ln; what promises less is measured no further; 0 measures every point in full
	GPUTime time.Duration // limit for starts, probes and stops; once it is spent, no trial begins; 0 means no limit
}

// A Study is one study to run. If it was interrupted, it continues where it ended.
type Study struct {
	Store       Store
	Runner      *trial.Runner
	Space       *space.Space
	Sampler     sampler.Sampler
	Current     space.Point // the user's current args, measured by trial 1; nil if unknown
	Confirm     int         // number of best points that are measured once more at the end, with fresh requests
	Presets     bool        // whether the presets are measured before the sampler chooses
	FixedArgs   []string    // args of every trial; the args of the point come after them
	Budget      Budget
	AcceptDrift bool            // continue if the server has another version than in earlier trials
	Finish      <-chan struct{} // when it is closed, Run finishes the current probe and returns
	Observe     func(Event)     // called for each event, one call at a time; may be nil

	// The state of one call of Run.
	ended        int      // trials
	unknownInRow int      // number of latest trials in a row whose outcome is Unknown
	generator    lateness // how often the load generator was late
}

// An Event tells the Observe function of a Study what has happened.
type Event struct {
	Kind  EventKind
	Trial studies.Trial // known so far
	Probe *trial.Probe  // for Probed: the new probe
	Step  string        // for Step: name of the step that begins
	Best  bool          // for Ended: the trial is now the Incumbent
}

// An EventKind is the kind of an Event.
type EventKind int

// The kinds of events, in their order within a trial.
const (
	Began EventKind = iota
	Step
	Probed
	Ended
)

// ErrNothingStarts is returned if the servers fail for all points, so that the flags are not the reason.
var ErrNothingStarts = errors.New("the server fails whatever the flags are")

const (
	// The study gives up after maxUnknown trials in a row that failed for another reason than their points.
	maxUnknown = 3
	// The study gives up if its first maxInfeasible trials are all infeasible, including the default and the current
	// args. A sampler learns nothing if all points fail.
	maxInfeasible = 10
)

// An End says why a study is over. The zero End means that it is not over.
type End struct {
	Why   string // one line of text for the user
	Spent bool   // the GPU time was used up before all trials were run
}

// State returns the final state and note of a study with planned trials. The state is Spent if the GPU time was used up
// before any trial of the present world met the SLO.
func (e End) State(study studies.Study, planned int) (state studies.State, note string) {
	if e.Spent && !slices.ContainsFunc(study.Present().Trials, studies.Trial.Met) {
		return studies.Spent, e.Why
	}
	if len(searchTrials(study.Trials)) == planned && !e.Spent { // no note is needed: the number of trials shows that all were run
		return studies.Done, ""
	}
	return studies.Done, e.Why
}

// Run chooses, begins, runs and finishes trials until the study is over. If an earlier Run was killed during a trial,
// that trial is finished first and keeps its probes. If Run returns an error, such as trial.ErrInterrupted, the store
// keeps all probes and trials so far.
func (s *Study) Run(ctx context.Context) (End, error) {
	for {
		study, err := s.Store.History(Compared)
		if err != nil {
			return End{}, err
		}
		first := len(study.Trials) - s.ended // index of the first trial that this Run began
		study.Trials = append(studies.Forgiven(study.Trials[:first]), study.Trials[first:]...)
		end, err := s.whyOver(ctx, study)
		if err != nil {
			return end, err
		}
		var next studies.Trial
		if end == (End{}) {
			next, err = s.nextTrial(study)
		}
		if errors.Is(err, sampler.ErrExhausted) {
			end, err = End{Why: err.Error()}, nil
		}
		if err != nil {
			return End{}, fmt.Errorf("choose the point of trial %d: %w", len(study.Trials), err)
		}
		if end != (End{}) { // the search is over
			point, left := s.unconfirmed(study)
			if !left {
				return end, nil
			}
			next = s.trialOf(study, studies.Confirmed, point)
		}
		if err := s.Store.Begin(next); err != nil {
			return End{}, fmt.Errorf("begin trial %d: %w", next.Number, err)
		}
		s.observe(Event{Kind: Began, Trial: next})
		if next.Result, err = s.runTrial(ctx, &next, study); err != nil {
			return End{}, fmt.Errorf("trial %d: %w", next.Number, err)
		}
		if err := s.Store.Finish(next.Number, next.Result); err != nil {
			return End{}, fmt.Errorf("finish trial %d: %w", next.Number, err)
		}
		next.State = studies.Done
		s.ended++
		study.Trials = append(study.Trials[:next.Number:next.Number], next)
		best, found := Incumbent(study)
		s.observe(Event{Kind: Ended, Trial: next, Best: found && best.Number == next.Number})
	}
}

// Incumbent returns the best trial so far of the present world. After a trial on another server version, earlier trials
// no longer count. found is false if no trial has met the SLO yet.
func Incumbent(study studies.Study) (best studies.Trial, found bool) {
	version := ""
	for _, t := range searchTrials(study.Present().Trials) {
		if t.State != studies.Done {
			continue
		}
		if t.Version != "" && t.Version != version { // a trial whose server did not start has no version
			version, found = t.Version, false
		}
		if t.Met() && (!found || t.Result.Capacity.Carried() > best.Result.Capacity.Carried()) {
			best, found = t, true
		}
	}
	return best, found
}

// Compared returns the numbers of the trials whose probes a study needs: those that a challenger or a finalist has to
// beat.
func Compared(study studies.Study) (numbers []int) {
	if best, found := Incumbent(study); found {
		numbers = append(numbers, best.Number)
	}
	if best, found := confirmedBest(study.Present(), ""); found {
		numbers = append(numbers, best.Number)
	}
	return numbers
}

// toBeat returns the best capacity so far on servers of a version, or none.
func toBeat(study studies.Study, version string) trial.Rival {
	best, found := Incumbent(study)
	if !found || best.Version != version {
		return trial.Rival{}
	}
	return rivalOf(best)
}

func rivalOf(t studies.Trial) trial.Rival {
	return trial.Rival{Capacity: t.Result.Capacity, Probes: t.Probes}
}

// whyOver says why no further trial begins. The zero End means that the study continues.
func (s *Study) whyOver(ctx context.Context, study studies.Study) (End, error) {
	select {
	case <-s.Finish:
		return End{}, trial.ErrInterrupted
	case <-ctx.Done():
		return End{}, context.Cause(ctx)
	default:
	}
	if err := s.generator.tooLate(); err != nil {
		return End{}, err
	}
	finished := lo.Filter(searchTrials(study.Trials), func(t studies.Trial, _ int) bool { return t.State == studies.Done && t.Counts() })
	infeasible := lo.CountBy(finished, func(t studies.Trial) bool { return t.Result.Outcome == trial.Infeasible })
	halfDone := slices.ContainsFunc(study.Trials, func(t studies.Trial) bool { return t.State != studies.Done })
	n, done := len(study.Trials), len(finished)
	switch {
	case halfDone: // this trial is finished even if the budget is spent
		return End{}, nil
	case s.ended >= studies.SameWords && !study.Trials[n-1].Counts(): // each Run tries SameWords trials again, because the points may have been the reason
		return End{}, diedAlike(study)
	case s.unknownInRow >= maxUnknown:
		return End{}, nothingStarts(study, "the last %d trials failed for other reasons than their flags", s.unknownInRow)
	case done >= maxInfeasible && infeasible == done && done < s.Budget.Trials:
		return End{}, nothingStarts(study, "none of the first %d points is feasible", done)
	case done >= s.Budget.Trials && studies.AllDiedAlike(study.Trials): // the budget has fewer trials than SameWords
		return End{}, diedAlike(study)
	case done >= s.Budget.Trials && done > 0 && len(study.Present().Trials) == 0:
		return End{Why: "budget.trials was used up before the world changed: raise it to measure in the new world", Spent: true}, nil
	case done >= s.Budget.Trials:
		return End{Why: "budget.trials is used up"}, nil
	case s.Budget.GPUTime > 0 && spent(study) >= s.Budget.GPUTime:
		why := fmt.Sprintf("the GPU time of %s is spent after %s", render.Span(s.Budget.GPUTime), render.Count(done, "trial"))
		return End{Why: why, Spent: true}, nil
	case s.Budget.MinGain > 0 && hopeless(finished):
		return End{Why: fmt.Sprintf("none of the first %d points keeps the SLO at any rate that was tried", done)}, nil
	case s.promisesLittle(study):
		return End{Why: fmt.Sprintf("no flags promise to gain %s (budget.min_gain)", render.Share(s.Budget.MinGain))}, nil
	}
	return End{}, nil
}

func nothingStarts(study studies.Study, format string, args ...any) error {
	last := study.Trials[len(study.Trials)-1].Result
	return withRemedy(last, fmt.Errorf("%w: %s; the last: %s: %s", ErrNothingStarts, fmt.Sprintf(format, args...), last.Class, last.Evidence))
}

// diedAlike returns the error for a study whose servers all died in their start with the same message. This shows that
// the flags are not the reason.
func diedAlike(study studies.Study) error {
	n := len(study.Trials)
	study.Trials[n-1].Result.Cause = serverctl.SameWords
	if n == 1 {
		return nothingStarts(study, "the only server died during its start")
	}
	return nothingStarts(study, "each of the first %d servers died with the same message", n)
}

// withRemedy adds advice for the user to err, if there is any.
func withRemedy(r trial.Result, err error) error {
	if remedy := serverctl.Remedy(r.Class, r.Cause); remedy != "" {
		return fmt.Errorf("%w; %s", err, remedy)
	}
	return err
}

// nextTrial returns the trial to run. In this order, it is a half-done trial, the server's default, the user's current
// args, the best prior, or the sampler's choice. The default and the current args are measured again if their trials
// had no useful result, or if the world has changed since then.
func (s *Study) nextTrial(study studies.Study) (studies.Trial, error) {
	n := len(study.Trials)
	now := countAsTried(study.Present(), n-s.ended)
	now.Trials = searchTrials(now.Trials)
	prior, preset := s.untriedPrior(now), s.untriedPreset(now)
	switch {
	case n > 0 && study.Trials[n-1].State == studies.Running:
		return study.Trials[n-1], nil
	case !referenceKnown(now, studies.Default):
		return s.trialOf(study, studies.Default, space.Point{}), nil
	case len(s.Current) > 0 && !referenceKnown(now, studies.Current):
		return s.trialOf(study, studies.Current, s.Current), nil
	case preset != nil:
		return s.trialOf(study, studies.Preset, preset), nil
	case prior != nil:
		return s.trialOf(study, studies.Prior, prior), nil
	}
	point, err := s.Sampler.Next(n, history(now))
	return s.trialOf(study, studies.Sampled, point), err
}

// trialOf returns the study's next trial: a point that was chosen as origin says.
func (s *Study) trialOf(study studies.Study, origin studies.Origin, point space.Point) studies.Trial {
	return studies.Trial{
		Number: len(study.Trials), State: studies.Running, Began: time.Now(), Origin: origin, Point: point,
		Args: append(append([]string{}, s.FixedArgs...), s.Space.Args(point)...),
	}
}

// countAsTried returns the study with all trials from number first on marked as tried, even those that do not count.
// Otherwise a study on a broken machine would start the default again and again. The default itself may be the reason
// of the failure, so other points must be tried.
func countAsTried(study studies.Study, first int) studies.Study {
	study.Trials = slices.Clone(study.Trials)
	for i := range study.Trials {
		if t := &study.Trials[i]; t.Number >= first && !t.Counts() {
			t.Result.Outcome, t.Result.Cause = trial.Infeasible, ""
		}
	}
	return study
}

// referenceKnown reports whether a trial of that origin had a useful result. Other trials are compared with it, so a
// trial that the load generator limited does not count. After maxLimited such trials, referenceKnown reports true, so
// that the study does not repeat them for ever.
func referenceKnown(study studies.Study, origin studies.Origin) bool {
	limited := 0
	for _, t := range study.Trials {
		switch {
		case t.Origin != origin || t.Result.Outcome == trial.Unknown && t.Result.Class != serverctl.ClientLimited:
		case t.Result.Class != serverctl.ClientLimited:
			return true
		default:
			limited++
		}
	}
	return limited >= maxLimited
}

// runTrial measures one trial. Each probe is stored at once. If a failure may be gone with a new server, the trial gets
// a second server before the failure counts.
func (s *Study) runTrial(ctx context.Context, t *studies.Trial, study studies.Study) (trial.Result, error) {
	result, err := s.runOnServer(ctx, t, study, lastAttempt(t.Probes))
	if changed, ok := errors.AsType[*changedError](err); ok {
		return trial.Result{Outcome: trial.Unknown, Class: serverctl.Aborted, Evidence: changed.Error(), GPUTime: gpuTime(t.Probes)}, nil
	}
	if err == nil && result.Class.Retryable() {
		s.observe(Event{Kind: Step, Trial: *t, Step: fmt.Sprintf("once more, because it ended with %s", result.Class)})
		first, recorded := result, gpuTime(t.Probes)
		result, err = s.runOnServer(ctx, t, study, lastAttempt(t.Probes)+1)
		result.GPUTime += first.GPUTime - recorded // subtract the probes of the first server, which both results include
		result.Notes = append(result.Notes, fmt.Sprintf("a first server ended with %s: %s", first.Class, first.Evidence))
	}
	if err == nil {
		err = s.blame(t, &result)
	}
	s.unknownInRow++
	if err != nil || result.Outcome != trial.Unknown || result.Class == serverctl.ClientLimited { // the server did not fail
		s.unknownInRow = 0
	}
	return result, err
}

// lastAttempt returns the highest attempt of the probes; 0 if there are none.
func lastAttempt(probes []trial.Probe) int {
	return lo.Max(lo.Map(probes, func(p trial.Probe, _ int) int { return p.Attempt }))
}

// blame decides whether the point or the machine is the reason of a failure, if class and cause do not show it. An
// error means that the machine is broken, and ends the study. After the repair, the trial is continued.
func (s *Study) blame(t *studies.Trial, r *trial.Result) error {
	switch {
	case r.Cause.Machine():
	case r.Argparse && len(t.Point) == 0: // these are args of every trial, so every trial would fail
	case r.Cause == serverctl.HostOOM && slices.ContainsFunc(slices.Collect(maps.Keys(t.Point)), serverctl.AsksHostMemory):
		r.Outcome = trial.Infeasible // this is the second server with these flags that found no memory
		return nil
	default:
		return nil
	}
	return withRemedy(*r, fmt.Errorf("%w: %s: %s", ErrNothingStarts, serverctl.Words(r.Class, r.Cause), r.Evidence))
}

// gpuTime returns the sum of the GPU times of the probes.
func gpuTime(probes []trial.Probe) time.Duration {
	return lo.SumBy(probes, func(p trial.Probe) time.Duration { return p.GPUTime })
}

// runOnServer measures a trial on one server.
func (s *Study) runOnServer(ctx context.Context, t *studies.Trial, study studies.Study, attempt int) (trial.Result, error) {
	task := trial.Task{
		Number: t.Number, Args: t.Args, Attempt: attempt, Done: t.Probes, Budget: s.trialBudget(study, t.Origin),
		Hint: func() float64 { return hint(study.Present(), t.Version) },
		Record: func(p trial.Probe) error {
			if err := s.Store.Record(t.Number, p); err != nil {
				return err
			}
			t.Probes = append(t.Probes, p)
			s.generator.count(p)
			s.observe(Event{Kind: Probed, Trial: *t, Probe: &p})
			return nil
		},
		Accept:   func(facts serverctl.Facts) error { return s.served(study, t, facts.Version) },
		Progress: func(step string) { s.observe(Event{Kind: Step, Trial: *t, Step: step}) },
		Finish:   s.Finish,
	}
	switch {
	case t.Origin == studies.Confirmed:
		s.confirm(&task, t, study.Present())
	case s.Budget.MinGain > 0:
		task.MaxFails = maxFails
		task.Best = func() trial.Rival { return toBeat(study, t.Version) }
		if rate := lowestFailed(study.Present()); rate > 0 { // nothing has met the SLO yet
			task.MaxFails = maxFailsAgain
			task.Hint = func() float64 { return rate }
		}
	}
	return s.Runner.Run(ctx, task)
}

// served stores the version of a trial's server. Measurements on two versions cannot be compared. So the version must
// be the same as in earlier trials, and in earlier probes of the same trial, unless the user accepts a change. If the
// server does not report a version, served does nothing.
func (s *Study) served(study studies.Study, t *studies.Trial, version string) error {
	// A half-done trial keeps the version it began with. If the user accepted a change, the store has it.
	if version == "" || t.Version == version {
		return nil
	}
	before := *t
	if len(t.Probes) == 0 || t.Version == "" {
		last, _, found := lo.FindLastIndexOf(study.Trials[:t.Number], func(t studies.Trial) bool { return t.Version != "" })
		switch {
		case !found || last.Version == version && t.Version == "":
			return s.serve(t, version, studies.Change{})
		case last.Version == version: // the user accepted another version, but returned to the old one before the first probe
			return s.serve(t, version, studies.VersionChange(*t, version))
		}
		before = last
	}
	change := studies.VersionChange(before, version)
	switch {
	case !s.AcceptDrift:
		return fmt.Errorf("%w: %s; start the old version, begin a study under another name, or go on with --accept-drift", studies.ErrWorldChanged, change)
	case len(t.Probes) > 0:
		return &changedError{change}
	}
	return s.serve(t, version, change)
}

func (s *Study) serve(t *studies.Trial, version string, change studies.Change) error {
	if err := s.Store.Served(t.Number, version, change); err != nil {
		return err
	}
	t.Version = version
	return nil
}

// A changedError says that earlier probes of the trial were measured on another version of the server.
type changedError struct{ change studies.Change }

func (e *changedError) Error() string {
	return "the world changed before the trial was finished: " + e.change.String()
}

func (s *Study) observe(e Event) {
	if s.Observe != nil {
		s.Observe(e)
	}
}
