package searchbench

import (
	"context"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// An answer is the point that a method recommends, with the capacity that it reports.
type answer struct {
	Point     space.Point
	Rate      float64 // requests per second
	Bound     capacity.Bound
	Low, High float64 // 95 % interval; 0 where the method gives none
	StdErr    float64
}

// A step is a method's best guess when a trial has ended.
type step struct {
	GPU     time.Duration // GPU time spent so far
	Point   space.Point   // nil while nothing met the limits
	Rate    float64       // requests per second that the method reports for the point
	Crashed bool          // whether the trial's server did not run
}

// A methodRun is all that a method did in one world with one seed.
type methodRun struct {
	World, Method string
	Seed          uint64
	Steps         []step // one for each trial
	Best          *answer
	Spent         gpuTimes
	Counted       time.Duration // GPU time as the method itself counts it; 0 if it counts none
	Took          time.Duration // real time
}

func (f methodRun) crashes() (n int) {
	for _, s := range f.Steps {
		if s.Crashed {
			n++
		}
	}
	return n
}

// A method is a named way to find the best point of a world.
type method struct {
	name    string
	skipped string // why it cannot run here; "" when it can
	own     bool   // whether it is a study of this project, which has fewer trials than its rivals
	find    func(w world, seed uint64, trials int) (methodRun, error)
}

// methods returns the methods in the order of the table.
func methods() []method {
	var all []method
	for _, one := range []struct {
		name, sampler string
		prior         prior
	}{{"study-gp", "gp", similar}, {"study-cold", "gp", none}, {"study-misled", "gp", shuffled}, {"study-tpe", "tpe", none}} {
		all = append(all, method{one.name, unknownSampler(one.sampler), true, func(w world, seed uint64, trials int) (methodRun, error) {
			f, err := runStudy(w, one.sampler, one.prior, seed, trials)
			f.Method = one.name
			return f, err
		}})
	}
	for _, name := range []string{"tpe", "gp"} {
		all = append(all, method{"optuna-" + name, noOptuna(name), false, func(w world, seed uint64, trials int) (methodRun, error) {
			return runRival(w, seed, trials, func(p *plan.Plan) (chooser, error) { return startOptuna(name, p.Search.Space, seed) })
		}})
	}
	for _, name := range []string{"random", "sobol"} {
		all = append(all, method{name, "", false, func(w world, seed uint64, trials int) (methodRun, error) {
			return runRival(w, seed, trials, newBlind(name, seed, trials))
		}})
	}
	return append(all, method{"sweep12", "", false, sweep12}, method{"auto_tune", "", false, autoTune})
}

// unknownSampler says why the sampler cannot be used; "" if it can.
func unknownSampler(name string) string {
	s, err := space.New([]space.Parameter{{Name: "max-num-seqs", Kind: space.Int, Min: 1, Max: 8}}, nil, nil, nil)
	if err == nil {
		_, err = sampler.New(name, s, 1, 1)
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

// runStudy runs the project's own study, as `tuner run` does.
func runStudy(w world, name string, believed prior, seed uint64, trials int) (f methodRun, err error) {
	began := time.Now()
	f = methodRun{World: w.name, Seed: seed}
	p, err := w.open(seed)
	if err != nil {
		return f, err
	}
	if trials == 0 {
		trials = p.File.Budget.Trials
	}
	if p.Search.Sampler, err = sampler.New(name, p.Search.Space, seed, trials); err != nil {
		return f, err
	}
	store, closeStore, err := openStore(w.name, seed)
	if err != nil {
		return f, err
	}
	defer closeStore()
	m := &meter{start: w.start()}
	runner := p.Runner()
	runner.Start = m.Start
	study := &tuner.Study{
		Store: store, Runner: runner, Space: p.Search.Space, Sampler: p.Search.Sampler, Current: p.Search.Current, FixedArgs: p.File.Server.Args,
		Presets: p.File.Sampler.Presets && (studyfile.Sampler{Name: name}).Learns(), Confirm: p.File.Budget.Confirm, MaxRounds: capacity.MaxRounds,
		Budget: tuner.Budget{Trials: trials, GPUTime: p.File.Budget.GPUTime, MinGain: p.File.Budget.MinGain},
	}
	if study.Predict, err = believed.predictor(p, seed); err != nil {
		return f, err
	}
	var broken error
	study.Observe = func(e tuner.Event) {
		if e.Kind != tuner.Ended || broken != nil {
			return
		}
		var s studies.Study
		if s, broken = store.Study(); broken != nil {
			return
		}
		f.Counted += e.Trial.Result.GPUTime
		f.Best = answerOf(s)
		f.Steps = append(f.Steps, stepOf(m, f.Best, e.Trial.Result))
	}
	if _, err := study.Run(background); err != nil {
		return f, fmt.Errorf("%s, %s, seed %d: %w", f.World, f.Method, seed, err)
	}
	s, err := store.Study()
	f.Best, f.Spent, f.Took = answerOf(s), m.spent, time.Since(began)
	if broken != nil {
		err = broken
	}
	return f, err
}

// openStore opens a store in a new directory. closeStore removes the directory.
func openStore(name string, seed uint64) (store *studies.Store, closeStore func(), err error) {
	dir, err := os.MkdirTemp("", "searchbench-")
	if err != nil {
		return nil, nil, err
	}
	settings := studies.New{Name: strings.ToLower(name), Seed: seed, World: map[string]string{"model": name}}
	store, _, err = studies.Open(context.Background(), dir+"/study", settings, studies.Options{})
	if err != nil {
		os.RemoveAll(dir)
		return nil, nil, err
	}
	return store, func() {
		store.Close() // the answer is read already
		os.RemoveAll(dir)
	}, nil
}

// answerOf returns the point and the capacity that `tuner best` prints.
func answerOf(s studies.Study) *answer {
	best, ok := report.Best(s)
	if !ok {
		return nil
	}
	c := best.Capacity
	return &answer{
		Point: best.Trial.Point, Rate: c.Rate, Bound: c.Bound, Low: c.Lowest, High: c.Highest, StdErr: c.StdErr,
	}
}

func stepOf(m *meter, best *answer, r trial.Result) step {
	s := step{GPU: m.spent.total(), Crashed: r.Outcome == trial.Infeasible}
	if best != nil {
		s.Point, s.Rate = best.Point, best.Rate
	}
	return s
}

// A chooser chooses the points that another tool's method tries. Its method told receives the capacity of the last
// point; 0 means that the point failed.
type chooser interface {
	next(number int) (space.Point, error)
	told(capacity float64) error
	close() error
}

// maxIllegal limits how often a chooser may choose a point that the constraints forbid. Such a point costs no GPU time.
const maxIllegal = 1000

// runRival measures the server's default, and then the points that a chooser chooses. It measures each point with a
// plain search from a primed cache. There is no race: each point is measured in full.
func runRival(w world, seed uint64, trials int, begin func(*plan.Plan) (chooser, error)) (f methodRun, err error) {
	began := time.Now()
	f = methodRun{World: w.name, Seed: seed}
	p, err := w.open(seed)
	if err != nil {
		return f, err
	}
	choose, err := begin(p)
	if err != nil {
		return f, err
	}
	defer func() {
		if closed := choose.close(); err == nil {
			err = closed
		}
	}()
	m := &meter{start: w.start()}
	runner := plainRunner(p)
	runner.Start = m.Start
	for n := range trials {
		point := space.Point{}
		if n > 0 {
			if point, err = nextLegal(p.Search.Space, choose, n); err != nil {
				return f, err
			}
		}
		result, err := runner.Run(background, trial.Task{
			Number: n, Args: append(append([]string{}, p.File.Server.Args...), p.Search.Space.Args(point)...),
			Hint: func() float64 { return f.hint() }, Record: func(trial.Probe) error { return nil },
		})
		if err != nil {
			return f, fmt.Errorf("%s, seed %d, trial %d: %w", f.World, seed, n, err)
		}
		f.Counted += result.GPUTime
		f.Best = higherAnswer(f.Best, point, result)
		f.Steps = append(f.Steps, stepOf(m, f.Best, result))
		if n > 0 {
			if err := choose.told(result.Capacity.Carried()); err != nil {
				return f, err
			}
		}
	}
	f.Spent, f.Took = m.spent, time.Since(began)
	return f, nil
}

// hint is the rate at which the next search begins: the best capacity so far.
func (f *methodRun) hint() float64 {
	if f.Best == nil {
		return 0
	}
	return f.Best.Rate
}

// plainRunner returns a Runner with the settings of `tuner init`. It lacks the settings that only a study adds.
func plainRunner(p *plan.Plan) *trial.Runner {
	f := p.File
	return &trial.Runner{
		Source: p.Load.Source, SLO: f.SLO, Seed: p.Load.Seed, Cache: p.Load.Protocol(), PrimeRate: f.Cache.PrimeRate,
		MinAcceptance: f.Speculation.MinAcceptance, MinDrafted: f.Speculation.MinDrafted, WorstCase: f.Probe.WorstCase,
		Lengths: trial.Lengths{LeadIn: f.Probe.LeadIn, Window: f.Probe.Window, MinRequests: f.Probe.MinRequests},
		Search: capacity.Search{
			Hint: f.Probe.StartRate, Min: f.Probe.MinRate, Max: f.Probe.MaxRate, Factor: plan.Gallop,
			Tolerance: f.Probe.Tolerance, MaxProbes: f.Probe.MaxProbes,
		},
	}
}

func nextLegal(s *space.Space, choose chooser, number int) (space.Point, error) {
	for range maxIllegal {
		point, err := choose.next(number)
		if err != nil {
			return nil, err
		}
		if s.Check(point) == nil {
			return point, nil
		}
		if err := choose.told(0); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("%d points in a row are not legal", maxIllegal)
}

// higherAnswer returns the answer with the higher capacity.
func higherAnswer(best *answer, point space.Point, r trial.Result) *answer {
	c := r.Capacity
	if r.Outcome != trial.Measured || c.Carried() == 0 || best != nil && best.Rate >= c.Carried() {
		return best
	}
	return &answer{Point: point, Rate: c.Carried(), Bound: c.Bound, Low: c.Lowest, High: c.Highest, StdErr: c.StdErr}
}

// A blindChooser chooses as a sampler does that learns nothing.
type blindChooser struct {
	sampler sampler.Sampler
	history []studies.Trial
}

func newBlind(name string, seed uint64, trials int) func(*plan.Plan) (chooser, error) {
	return func(p *plan.Plan) (chooser, error) {
		s, err := sampler.New(name, p.Search.Space, seed, trials)
		return &blindChooser{sampler: s}, err
	}
}

func (c *blindChooser) next(number int) (space.Point, error) {
	point, err := c.sampler.Next(number, c.history)
	c.history = append(c.history, studies.Trial{Number: number, Point: point, State: studies.Done})
	return point, err
}

func (c *blindChooser) told(float64) error { return nil }

func (c *blindChooser) close() error { return nil }

// logRatio is ln(a/b). It is 0 if a or b is not positive.
func logRatio(a, b float64) float64 {
	if a <= 0 || b <= 0 {
		return 0
	}
	return math.Log(a / b)
}
