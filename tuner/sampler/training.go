package sampler

import (
	"cmp"
	"math"
	"slices"

	"github.com/samber/lo"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

const (
	// unknownErr is the standard error of ln capacity for a trial that has no error of its own. A search with the
	// default probes has this error.
	unknownErr = 0.08
	// priorErr is the smallest standard error of a prior. Other tools measure with other windows and limits.
	priorErr = 0.15
)

// A trainingSet is what the model learns from a history.
type trainingSet struct {
	values  []datum // ln capacities and bounds of them
	trials  []int   // for each value, the index of its trial in the history
	labels  []label // which points run
	own     []row   // measured points of the study itself
	pending []row   // points of trials that run now
	failed  int     // number of infeasible trials
	trends  []trend // what large sources of priors say

	mean, spread float64 // mean and spread of the values
}

// learn reads the history before the trial with the given number.
func learn(s *space.Space, number int, history []studies.Trial) trainingSet {
	l := trainingSet{trends: trends(s, history)}
	for i := range history {
		t := &history[i]
		p := complete(s, *t)
		switch {
		case l.isTrend(t):
			continue
		case len(p) == 0 && len(s.Variables()) == 0 || len(t.Point) == 0 && flagsIn(p) < unconditional(s):
			continue // the server's default, whose values are not known
		case t.State != studies.Done:
			if t.Number != number {
				l.pending = append(l.pending, l.row(s, p))
			}
			continue
		}
		r := l.row(s, p)
		switch t.Result.Outcome {
		case trial.Infeasible:
			l.failed++
		case trial.Measured, trial.Dropped:
			if d, ok := valueOf(t); ok {
				d.row = r
				l.values, l.trials = append(l.values, d), append(l.trials, i)
				if t.Number >= 0 {
					l.own = append(l.own, r)
				}
			}
		default:
			continue
		}
		l.labels = append(l.labels, labelOf(r, t))
	}
	l.boundDropped(s, history)
	l.standardise()
	l.centre(len(s.Parameters()))
	return l
}

// rows returns all rows that the model uses.
func (l *trainingSet) rows() []row {
	return slices.Concat(rowsOf(l.values), lo.Map(l.labels, func(one label, _ int) row { return one.row }), l.pending)
}

func rowsOf(data []datum) []row {
	return lo.Map(data, func(d datum, _ int) row { return d.row })
}

// valueOf returns the ln capacity of a trial, or the known bound of it.
func valueOf(t *studies.Trial) (d datum, ok bool) {
	c := t.Result.Capacity
	rate := c.Rate
	switch {
	case t.Result.Outcome == trial.Dropped && t.Result.Class != serverctl.DroppedByRace:
		return datum{side: below, value: math.NaN(), err: unknownErr}, true // boundDropped finds the value
	case c.Bound == capacity.AtMost:
		d.side = below
	case c.Bound == capacity.AtLeast:
		d.side = above
		if c.Low > 0 {
			rate = c.Low
		}
	}
	if !(rate > 0) || math.IsInf(rate, 1) {
		return d, false
	}
	d.value, d.err = math.Log(rate), unknownErr
	if stdErr := cmp.Or(c.RatioErr, c.StdErr); stdErr > 0 {
		d.err = min(max(stdErr, 0.002), 2)
	}
	if t.Number < 0 {
		d.err = max(priorErr, 2*d.err)
	}
	return d, true
}

// boundDropped gives an upper bound to trials that were dropped without a capacity. The bound is the best capacity
// without speculation, because drafts that are not accepted only cost time. If there is no such capacity, the bound is
// the best capacity of all. If no capacity is known at all, the trials only show that their points are feasible.
func (l *trainingSet) boundDropped(s *space.Space, history []studies.Trial) {
	tokens := slices.IndexFunc(s.Parameters(), func(p space.Parameter) bool { return p.Name == space.SpeculativeTokens })
	best, without := math.Inf(-1), math.Inf(-1)
	for _, d := range l.values {
		if d.side == below {
			continue
		}
		best = max(best, d.value)
		if tokens >= 0 && d.row[tokens].state != aNumber {
			without = max(without, d.value)
		}
	}
	if !math.IsInf(without, -1) {
		best = without
	}
	kept := 0
	for i, d := range l.values {
		if math.IsNaN(d.value) {
			d.value = best
		}
		if !math.IsInf(d.value, -1) {
			l.values[kept], l.trials[kept] = d, l.trials[i]
			kept++
		}
	}
	l.values, l.trials = l.values[:kept], l.trials[:kept]
}

// knee is a distance below the best value, in ln units. Values farther below are compressed, because the search needs
// to know where capacities are bad, but not how bad they are.
const knee = 0.7

// standardise compresses very low values, and computes mean and spread.
func (l *trainingSet) standardise() {
	top := math.Inf(-1)
	for _, d := range l.values {
		if d.side != below {
			top = max(top, d.value)
		}
	}
	var values []float64
	for i := range l.values {
		d := &l.values[i]
		d.compressed = 1
		if beyond := top - d.value - knee; beyond > 0 && !math.IsInf(beyond, 1) {
			d.value = top - knee - math.Log1p(beyond)
			d.compressed = 1 / (1 + beyond)
			d.err *= d.compressed
		}
		d.site, d.siteVariance = d.value, vagueVariance
		if d.side == exact {
			values = append(values, d.value)
		}
	}
	if len(values) == 0 {
		for _, d := range l.values {
			values = append(values, d.value)
		}
	}
	if len(values) > 0 {
		l.mean = stat.Mean(values, nil)
	}
	l.spread = 0.15 // the standard deviation of two or three values may be near 0 by chance
	if len(values) > 1 {
		l.spread = max(l.spread, stat.StdDev(values, nil))
	}
}

// knownDefaults has those defaults of vLLM that depend neither on vLLM's version nor on the GPU. Without
// speculative-config nothing is drafted.
var knownDefaults = map[string]string{utilizationFlag: "0.9", space.SpeculativeTokens: "0"}

// complete returns the trial's point with values for absent flags. It takes the value that the server reported, or the
// value in the study's fixed args, or vLLM's own default. An absent variable is not set. Flags with a condition stay
// absent, because they may be inactive.
func complete(s *space.Space, t studies.Trial) space.Point {
	p := space.Point{}
	parameters := s.Parameters()
	for i := range parameters {
		q := &parameters[i]
		if text, ok := t.Point[q.Name]; ok {
			p[q.Name] = text
			continue
		}
		if q.When != "" {
			continue
		}
		if q.HasUnset() {
			p[q.Name] = space.Unset
			continue
		}
		for _, from := range []map[string]string{t.Result.Facts.Args, s.Defaults, knownDefaults} {
			if text, ok := from[q.Name]; ok {
				if _, active := s.Unit(space.Point{q.Name: text}); active[i] {
					p[q.Name] = text
					break
				}
			}
		}
	}
	return p
}

// unconditional returns how many flags are always active. Variables do not count: an absent variable is not set, so its
// value is known.
func unconditional(s *space.Space) int {
	return lo.CountBy(s.Parameters(), func(p space.Parameter) bool { return p.When == "" && !space.IsVariable(p.Name) })
}

func flagsIn(p space.Point) int { return len(p.WithoutVariables()) }
