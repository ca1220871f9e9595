// Package calibrate fits a profile of the simulator to the measured trials of a study. It reports which constants the
// measurements do not determine. It never measures a server; it replays the study's probes in virtual time.
package calibrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// An Input has the study to which a profile is calibrated, and the settings of the fit.
type Input struct {
	Study  studies.Study
	Model  string        // the model that the study measured
	Runner *trial.Runner // has the settings with which the study's probes were measured; the fit replaces its Start and its Source
	From   *sim.Profile  // profile with the first values of the fit; constants that the study does not determine keep these values

	// Limit is the longest time that the fit may take. After this time, the fit ends with the best result so far. 0
	// means no limit.
	Limit time.Duration
	// Progress is called after each replay of all probes. done is the number of replays so far. Progress may be nil.
	Progress func(done, expected int)
}

// An InputError says why a study cannot be used for a calibration, and what the user can do.
type InputError struct{ Text string }

// Error returns the text.
func (e *InputError) Error() string { return e.Text }

func refuse(format string, args ...any) error { return &InputError{fmt.Sprintf(format, args...)} }

// A Certainty says how well the measurements determine a constant.
type Certainty string

const (
	Known    Certainty = "known"    // the measurements determine the constant
	Together Certainty = "together" // the constant is fitted, but only its joint effect with held constants is known
	Held     Certainty = "held"     // the constant has an effect, but other constants can have the same effect
	Unseen   Certainty = "unseen"   // the constant has no effect on the measurements
)

// A Change is the result for one constant.
type Change struct {
	Path, Unit    string
	Before, After float64
	Error         float64 // relative standard error of After; 0 if it is not known
	Certainty     Certainty
	With          []string // names of other constants with the same effect
}

// A Result is a calibrated profile and the report on it.
type Result struct {
	Profile   *sim.Profile
	Study     string
	From      string
	Simulated bool // the study measured a simulated server

	Trials, UsedTrials int
	Probes             int // all probes of the study
	Fitted, HeldOut    int
	LeftOut            Counts // probes that were left out, by reason
	LeftOutTrials      Counts

	Memory  Memory
	Metrics []Errors
	HitRate float64 // median absolute error of the predicted prefix-cache hit rate, 0 to 1; -1 if no hit rate was measured
	Prompts float64 // prompt tokens of the simulator / prompt tokens that the server counted; 0 if the server counted none
	Changes []Change
	Notes   []string

	Converged bool
	TimeUp    bool // Input.Limit ended the fit
	Replays   int  // number of replays; each replays all probes
	Took      time.Duration
}

// Memory says how well the profile predicts the sizes of the KV cache.
type Memory struct {
	N, Refused    int     // starts whose log has the size of the KV cache, and how many of them were refused
	Before, After float64 // root mean square error in GiB
}

// calibration is the state of one call of Fit.
type calibration struct {
	Input
	result Result
}

// Fit calibrates a profile. The error is an *InputError if the study has too few measurements or the time limit is too
// short.
func Fit(ctx context.Context, in Input) (*Result, error) {
	began := time.Now()
	c := &calibration{Input: in}
	c.result = Result{Study: in.Study.Name, From: in.From.Name, Trials: len(in.Study.Trials)}
	c.result.Simulated = slices.ContainsFunc(in.Study.Trials, func(t studies.Trial) bool { return t.Result.Facts.Simulated })
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
	c.noteConstantFlags(chosen)
	if err := newStepFit(c, p, chosen).run(ctx); err != nil {
		return nil, err
	}
	c.result.Profile, c.result.Took = p, time.Since(began)
	return &c.result, nil
}

// begin returns a copy of the profile Input.From, with the name of the model and with the server's default flags.
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

// enough counts the probes, and returns an *InputError if fewer than minProbes can be fitted.
func (c *calibration) enough(chosen []*candidate) error {
	fitted, heldOut := count(chosen)
	c.result.UsedTrials, c.result.Fitted, c.result.HeldOut = len(chosen), fitted, heldOut
	for _, t := range c.Study.Trials {
		c.result.Probes += len(t.Probes)
	}
	if fitted >= minProbes {
		return nil
	}
	var reasons []string
	for _, list := range []Counts{c.result.LeftOut, c.result.LeftOutTrials} {
		for _, left := range list {
			reasons = append(reasons, fmt.Sprintf("%d %s", left.N, left.Why))
		}
	}
	leftOut := ""
	if len(reasons) > 0 {
		leftOut = "; left out: " + strings.Join(reasons, ", ")
	}
	return refuse("study %s: %d of %s can be fitted, and the fit needs at least %d%s; measure more trials: raise budget.trials and run the study again, or use another study",
		c.Study.Name, fitted, render.Count(c.result.Probes, "probe"), minProbes, leftOut)
}

// note adds a note to the report.
func (c *calibration) note(format string, args ...any) {
	c.result.Notes = append(c.result.Notes, fmt.Sprintf(format, args...))
}

// set stores a measured or solved value of a constant in the profile, and reports the change.
func (c *calibration) set(p *sim.Profile, path string, value float64, confidence, format string, args ...any) {
	before := *p.Value(path)
	source := fmt.Sprintf(format, args...)
	p.Set(path, []float64{value}, confidence, fmt.Sprintf("study %s%s: %s", c.Study.Name, c.madeUp(), source))
	c.result.Changes = append(c.result.Changes, Change{Path: path, Unit: unit(p, path), Before: before, After: value, Certainty: Known})
}

// held keeps a constant's value from the profile Input.From, and stores the reason as its source.
func (c *calibration) held(p *sim.Profile, path, format string, args ...any) {
	value := *c.From.Value(path)
	p.Set(path, []float64{value}, "assumed", fmt.Sprintf("%s; value of %s", fmt.Sprintf(format, args...), c.From.Name))
}

// madeUp returns a text to add to the name of the study if it measured a simulated server.
func (c *calibration) madeUp() string {
	if c.result.Simulated {
		return " (of a simulated server)"
	}
	return ""
}

// unit returns the unit of a constant; "" for a plain number.
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

// record stores the fitted constants in the profile, and reports how certain each is. basis is the name of the
// measurements in the texts.
func (c *calibration) record(p *sim.Profile, f *fit, confidence, source, basis string) {
	stands := f.separation.together()
	moved := withLogs(p, f.list, f.logs)
	for k, one := range f.list {
		before, after := *c.From.Value(one.path), *moved.Value(one.path)
		change := Change{Path: one.path, Unit: unit(p, one.path), Before: before, After: after, Error: f.separation.errors[k]}
		switch {
		case f.separation.known[k]:
			change.Certainty = Known
			text := fmt.Sprintf("%s of study %s%s; standard error %s", source, c.Study.Name, c.madeUp(), render.Share(change.Error))
			for _, other := range stands[k] {
				change.With = append(change.With, f.list[other].path)
			}
			if len(change.With) > 0 {
				text += fmt.Sprintf("; only valid with the values of %s in %s, because the data cannot separate these constants from this one", strings.Join(change.With, ", "), c.From.Name)
			}
			if change.Error > maxError {
				change.Certainty = Together
			}
			p.Set(one.path, []float64{after}, confidence, text)
		case f.separation.visible[k]:
			change.Certainty, change.After = Held, before
			for _, other := range f.separation.groups[k] {
				change.With = append(change.With, f.list[other].path)
			}
			c.held(p, one.path, "not separable from %s in %s of study %s: only their sum is known", cmp.Or(strings.Join(change.With, " and "), "the other constants"), basis, c.Study.Name)
		default:
			change.Certainty, change.After = Unseen, before
			c.held(p, one.path, "has no effect on %s of study %s", basis, c.Study.Name)
		}
		c.result.Changes = append(c.result.Changes, change)
	}
}

var errTimeUp = errors.New("the time limit has passed")
