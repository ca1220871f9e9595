package sampler

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/samber/lo"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

const (
	// unknownErr is the standard error of ln capacity where a trial has none: that of a search with the default probes.
	unknownErr = 0.08
	// priorErr is the least standard error of a prior. Other tools measure with other windows and limits.
	priorErr = 0.15
)

// Lessons are what the model takes from a history.
type lessons struct {
	values  []datum // ln capacities and bounds of them
	trials  []int   // index in the history of the trial of each value
	labels  []datum // feasible points as lower bounds of 0, infeasible points as upper bounds
	own     []row   // measured points of the study itself
	pending []row   // points of trials that run now
	failed  int     // number of infeasible trials

	mean, spread float64 // of the values
	start        float64 // part of an average trial's GPU time that the server's start takes; 1 where it is not known
}

// learn reads the history before the trial of that number.
func learn(s *space.Space, number int, history []studies.Trial) lessons {
	l := lessons{start: startPart(history)}
	for i := range history {
		t := &history[i]
		p := complete(s, *t)
		switch {
		case len(p) == 0 || len(t.Point) == 0 && len(p) < unconditional(s):
			continue // the server's default, in flags that nobody knows
		case t.State != studies.Done:
			if t.Number != number {
				l.pending = append(l.pending, rowOf(s, p))
			}
			continue
		}
		r := rowOf(s, p)
		label := datum{row: r, side: above, variance: 1}
		switch t.Result.Outcome {
		case trial.Infeasible:
			label.side = below
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
		l.labels = append(l.labels, label)
	}
	l.boundDropped(s, history)
	l.standardise()
	return l
}

// rows returns all rows that the model meets.
func (l *lessons) rows() []row {
	return slices.Concat(rowsOf(l.values), rowsOf(l.labels), l.pending)
}

func rowsOf(data []datum) []row {
	return lo.Map(data, func(d datum, _ int) row { return d.row })
}

// valueOf returns the ln capacity of a trial, or the bound of it that is known.
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

// boundDropped gives trials that were dropped without a capacity an upper bound: the best capacity without speculation,
// because drafts that are not accepted only cost time. If there is none, it is the best capacity of all. If there is
// none either, the trials only show that their points are feasible.
func (l *lessons) boundDropped(s *space.Space, history []studies.Trial) {
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

// knee is how far below the best value, in ln units, values begin to be drawn together. The search needs to know where
// capacities are bad, and not how bad.
const knee = 0.7

// standardise draws very low values together, and finds mean and spread.
func (l *lessons) standardise() {
	top := math.Inf(-1)
	for _, d := range l.values {
		if d.side != below {
			top = max(top, d.value)
		}
	}
	var values []float64
	for i := range l.values {
		d := &l.values[i]
		if beyond := top - d.value - knee; beyond > 0 && !math.IsInf(beyond, 1) {
			d.value = top - knee - math.Log1p(beyond)
			d.err /= 1 + beyond
		}
		d.site, d.siteVariance = d.value, vague
		if d.side == exact {
			values = append(values, d.value)
		}
	}
	for i := range l.labels {
		l.labels[i].siteVariance = vague
	}
	if len(values) == 0 {
		for _, d := range l.values {
			values = append(values, d.value)
		}
	}
	if len(values) > 0 {
		l.mean = stat.Mean(values, nil)
	}
	l.spread = 0.15 // of two or three values the standard deviation may be near 0 by chance
	if len(values) > 1 {
		l.spread = max(l.spread, stat.StdDev(values, nil))
	}
}

// known are vLLM's defaults that depend neither on its version nor on the GPU. Without speculative-config nothing is
// drafted.
var known = map[string]string{utilizationFlag: "0.9", space.SpeculativeTokens: "0"}

// complete returns the trial's point with the values of absent flags: as the server reported them, as the study's fixed
// args have them, or vLLM's own defaults. Flags with a condition stay absent, because they may be inactive.
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
		for _, from := range []map[string]string{t.Result.Facts.Args, s.Defaults, known} {
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

// unconditional returns how many flags are always active.
func unconditional(s *space.Space) int {
	n := 0
	for _, p := range s.Parameters() {
		if p.When == "" {
			n++
		}
	}
	return n
}

// startPart returns the part of an average trial that its start takes. An infeasible trial is a start and no more.
func startPart(history []studies.Trial) float64 {
	var starts, whole []float64
	for _, t := range history {
		spent := t.Result.GPUTime
		if t.State != studies.Done || t.Number < 0 || spent <= 0 {
			continue
		}
		switch t.Result.Outcome {
		case trial.Infeasible:
			starts = append(starts, spent.Seconds())
		case trial.Measured, trial.Dropped:
			var probes time.Duration
			for _, p := range t.Probes {
				probes += p.GPUTime
			}
			whole = append(whole, spent.Seconds())
			if 0 < probes && probes < spent {
				starts = append(starts, (spent - probes).Seconds())
			}
		}
	}
	if len(starts) == 0 || len(whole) == 0 {
		return 1
	}
	return min(1, median(starts)/median(whole))
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
