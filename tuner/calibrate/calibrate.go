// Package calibrate fits a profile of the simulator to the measured trials of a study, and says which of its constants they do
// not tell. It measures nothing itself: what it predicts it replays in virtual time.
package calibrate

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/simload"
)

// An Input is what a profile is calibrated to.
type Input struct {
	Study  studies.Study
	Model  string       // that the study measured
	Runner trial.Runner // how its probes were measured; its Start is not used
	From   *sim.Profile // where the fit begins, and what stays where nothing is told

	// Limit is how long the fit may take; 0 means no limit. What was found by then is the answer.
	Limit time.Duration
	// Progress is told after each replay of all probes how many are done and how many there will be, as far as that is known; nil means nobody listens.
	Progress func(done, most int)
}

// An InputError says that a study cannot be calibrated to, and what can be done.
type InputError struct{ Text string }

// Error returns the text.
func (e *InputError) Error() string { return e.Text }

func refuse(format string, args ...any) error { return &InputError{fmt.Sprintf(format, args...)} }

// A Standing says what became of a constant.
type Standing string

// The standings.
const (
	Told     Standing = "told"     // the measurements tell it
	Together Standing = "together" // fitted, and only with others that were held is its effect known
	Held     Standing = "held"     // shows, and others can stand in for it
	Unseen   Standing = "unseen"   // does not show
)

// A Change is what became of one constant.
type Change struct {
	Path, Unit    string
	Before, After float64
	Error         float64 // standard error, as a part of After; 0 when there is none
	Standing      Standing
	With          []string // constants that can stand in for it, or that it stands in for
}

// A Result is a calibrated profile with all that is to be said of it.
type Result struct {
	Profile   *sim.Profile
	Study     string
	From      string
	Simulated bool // the study measured a simulated server

	Trials, UsedTrials int
	Probes             int // stored
	Fitted, HeldOut    int
	LeftOut            Counts // probes
	LeftOutTrials      Counts

	Memory  Memory
	Metrics []Errors
	HitRate float64 // median absolute difference of the hit rate of the prefix cache, 0 to 1; -1 when nobody told
	Prompts float64 // tokens of the simulator's prompts per token that the server counted; 0 when it did not
	Changes []Change
	Notes   []string

	Converged bool
	TimeUp    bool // the limit ended the fit
	Replays   int  // of all probes
	Took      time.Duration
}

// Memory is how well the sizes of the KV cache are told.
type Memory struct {
	N, Refused    int     // starts that told one, and those among them that were refused
	Before, After float64 // root of the mean square error, GiB
}

// calibration is the state of one Fit.
type calibration struct {
	Input
	rig     simload.Rig
	result  Result
	replays int
	most    int // replays that may be needed
}

// Fit calibrates a profile. It returns an *InputError when the study cannot tell enough.
func Fit(ctx context.Context, in Input) (*Result, error) {
	began := time.Now()
	c := &calibration{Input: in}
	c.Runner.Source = &memo{Source: in.Runner.Source}
	c.result = Result{Study: in.Study.Name, From: in.From.Name, Trials: len(in.Study.Trials), Simulated: simulated(in.Study)}
	p := c.begin()
	if err := c.solveMemory(ctx, p); err != nil {
		return nil, err
	}
	c.boundReserve(p)
	c.times(p)
	c.acceptance(p)
	chosen := c.choose(p)
	if err := c.enough(chosen); err != nil {
		return nil, err
	}
	c.sayConstantFlags(chosen)
	if err := c.fitSteps(ctx, p, chosen); err != nil {
		return nil, err
	}
	c.result.Profile, c.result.Replays, c.result.Took = p, c.replays, time.Since(began)
	return &c.result, nil
}

func simulated(s studies.Study) bool {
	return slices.ContainsFunc(s.Trials, func(t studies.Trial) bool { return t.Result.Facts.Simulated })
}

// begin returns a copy of the first profile under the model's name, with the defaults that the server told.
func (c *calibration) begin() *sim.Profile {
	p := *c.From
	p.Constants = slices.Clone(p.Constants)
	p.Model = c.Model
	what := "measured"
	if c.result.Simulated {
		what = "simulated"
	}
	p.About = fmt.Sprintf("%s, calibrated by tuner sim calibrate to the %s trials of study %s of %s, from %s",
		c.Model, what, c.Study.Name, c.Study.Updated.Format(time.DateOnly), c.From.Name)
	c.defaults(&p)
	return &p
}

// enough refuses a study that is too small.
func (c *calibration) enough(chosen []*candidate) error {
	fitted, heldOut := count(chosen)
	c.result.UsedTrials, c.result.Fitted, c.result.HeldOut = len(chosen), fitted, heldOut
	for _, t := range c.Study.Trials {
		c.result.Probes += len(t.Probes)
	}
	if fitted >= leastProbes {
		return nil
	}
	why := ""
	for _, list := range []Counts{c.result.LeftOut, c.result.LeftOutTrials} {
		for _, left := range list {
			why += fmt.Sprintf(", %d %s", left.N, left.Why)
		}
	}
	return refuse("study %s has %d probes to fit, and %d are needed at least (%d are stored%s); measure more trials: raise budget.trials and run it again, or calibrate to another study",
		c.Study.Name, fitted, leastProbes, c.result.Probes, why)
}

// note adds a remark to the report.
func (c *calibration) note(format string, args ...any) {
	c.result.Notes = append(c.result.Notes, fmt.Sprintf(format, args...))
}

// set gives a constant of the profile a value that was measured or solved, and reports it.
func (c *calibration) set(p *sim.Profile, path string, value float64, confidence, format string, args ...any) {
	before := *p.Value(path)
	source := fmt.Sprintf(format, args...)
	p.Set(path, []float64{value}, confidence, fmt.Sprintf("study %s%s: %s", c.Study.Name, c.madeUp(), source))
	c.result.Changes = append(c.result.Changes, Change{Path: path, Unit: unit(p, path), Before: before, After: value, Standing: Told})
}

// held leaves a constant at the first profile's value, and says why in its source.
func (c *calibration) held(p *sim.Profile, path, format string, args ...any) {
	value := *c.From.Value(path)
	p.Set(path, []float64{value}, "assumed", fmt.Sprintf("%s; value of %s", fmt.Sprintf(format, args...), c.From.Name))
}

// madeUp follows the name of a study of a simulated server.
func (c *calibration) madeUp() string {
	if c.result.Simulated {
		return " (of a simulated server)"
	}
	return ""
}

// unit is a constant's, or nothing of a plain number.
func unit(p *sim.Profile, path string) string {
	i := slices.IndexFunc(p.Constants, func(k sim.Constant) bool { return k.Path == path })
	if i < 0 {
		return ""
	}
	if one := p.Constants[i].Unit; one != "1" {
		return one
	}
	return ""
}

// record puts a fit into the profile, each constant with what is known of it. what says which measurements these are.
func (c *calibration) record(p *sim.Profile, f *fit, confidence, source, what string) {
	stands := f.reading.together()
	moved := with(p, f.list, f.logs)
	for k, one := range f.list {
		before, after := *c.From.Value(one.path), *moved.Value(one.path)
		change := Change{Path: one.path, Unit: unit(p, one.path), Before: before, After: after, Error: f.reading.errors[k]}
		switch {
		case f.reading.told[k]:
			change.Standing = Told
			text := fmt.Sprintf("%s of study %s%s; standard error %s", source, c.Study.Name, c.madeUp(), percent(change.Error))
			for _, other := range stands[k] {
				change.With = append(change.With, f.list[other].path)
			}
			if len(change.With) > 0 {
				text += fmt.Sprintf("; with %s, which the data do not tell from it, at the value of %s", strings.Join(change.With, ", "), c.From.Name)
			}
			if change.Error > mostError {
				change.Standing = Together
			}
			p.Set(one.path, []float64{after}, confidence, text)
		case f.reading.shows[k]:
			change.Standing, change.After = Held, before
			for _, other := range f.reading.groups[k] {
				change.With = append(change.With, f.list[other].path)
			}
			c.held(p, one.path, "not separable from %s in %s of study %s: only their sum shows", orOthers(change.With), what, c.Study.Name)
		default:
			change.Standing, change.After = Unseen, before
			c.held(p, one.path, "does not show in %s of study %s", what, c.Study.Name)
		}
		c.result.Changes = append(c.result.Changes, change)
	}
}

func orOthers(names []string) string {
	if len(names) == 0 {
		return "the other constants"
	}
	return strings.Join(names, " and ")
}

// tell says how far the fit is.
func (c *calibration) tell() {
	if c.Progress != nil {
		c.Progress(c.replays, max(c.most, c.replays+c.replays/10))
	}
}

// each runs do for every number below n, as many at a time as there are processors, and waits for all.
func (c *calibration) each(n int, do func(i int)) {
	numbers := make(chan int)
	var workers sync.WaitGroup
	for range min(n, runtime.GOMAXPROCS(0)) {
		workers.Go(func() {
			for i := range numbers {
				do(i)
			}
		})
	}
	for i := range n {
		numbers <- i
	}
	close(numbers)
	workers.Wait()
}

// timeUp reports whether an error is the end of the limit, and not that of ctx.
func timeUp(ctx context.Context, err error) bool {
	return errors.Is(err, errTimeUp) && ctx.Err() == nil
}

var errTimeUp = errors.New("the time limit has passed")

// A memo remembers the requests of a source that makes new ones each time: their content is hashed once.
type memo struct {
	workload.Source
	mu    sync.Mutex
	known map[key]*workload.Request
}

type key struct {
	stream workload.Stream
	i      int
}

// mostRemembered bounds a memo; simload remembers as many.
const mostRemembered = 4096

// Request returns the same request for the same question.
func (m *memo) Request(stream workload.Stream, i int) *workload.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r, ok := m.known[key{stream, i}]; ok {
		return r
	}
	if m.known == nil || len(m.known) >= mostRemembered {
		m.known = make(map[key]*workload.Request)
	}
	r := m.Source.Request(stream, i)
	m.known[key{stream, i}] = r
	return r
}
