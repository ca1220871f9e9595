package capacity

import (
	"cmp"
	"context"
	"fmt"
	"slices"
)

// A Step is one load of a search or a sweep with what its probe said. A load is a rate in requests per second, or in a sweep over
// a closed loop so many requests in flight.
type Step struct {
	Rate float64 `json:"rate"`
	Outcome
}

// Sweep probes every load of a grid in its order, whatever came of those before: the manual sweep. On an error it returns the
// steps before it too.
func Sweep(ctx context.Context, grid []float64, probe Probe) ([]Step, error) {
	steps := make([]Step, 0, len(grid))
	for _, rate := range grid {
		outcome, err := probe(ctx, rate)
		if err != nil {
			return steps, err
		}
		steps = append(steps, Step{rate, outcome})
	}
	return steps, nil
}

// Highest reads a sweep. The capacity's Rate is the highest load that kept the SLO, a load of the grid: nothing is known of those
// between it and High, the next one that was measured and failed. A step that the load generator may have decided is neither a
// pass nor a fail.
//
// below are the loads under Rate that failed, ascending: where there are any, the verdicts are not monotone, and the capacity is
// a matter of luck. Of no steps the capacity is zero, and has no Bound.
func Highest(steps []Step) (c Capacity, below []float64) {
	c.Probes = len(steps)
	var low, high *Step
	limited := ""
	for i := range steps {
		switch s := &steps[i]; {
		case s.Limited != "":
			limited = fmt.Sprintf("; at %.4g %s", s.Rate, s.Limited)
		case s.Pass && (low == nil || s.Rate > low.Rate):
			low = s
		}
	}
	for i := range steps {
		s := &steps[i]
		switch {
		case s.Pass || s.Limited != "":
		case low != nil && s.Rate < low.Rate:
			below = append(below, s.Rate)
		case high == nil || s.Rate < high.Rate:
			high = s
		}
	}
	slices.Sort(below)
	switch {
	case low == nil && high == nil:
		c.Why = "nothing was measured" + limited
		return c, below
	case low == nil:
		c.Rate, c.High, c.Bound, c.Binding, c.InFlight = high.Rate, high.Rate, AtMost, high.Binding, high.InFlight
		c.Why = fmt.Sprintf("failed at the lowest load, %.4g%s", high.Rate, limited)
		return c, below
	}
	c.Rate, c.Low, c.Bound, c.Binding, c.InFlight = low.Rate, low.Rate, AtLeast, low.Binding, low.InFlight
	c.Why = fmt.Sprintf("passed at the highest load, %.4g%s", low.Rate, limited)
	if high != nil {
		c.High, c.Bound, c.Binding = high.Rate, Exact, high.Binding
		c.Why = fmt.Sprintf("the next load of the grid, %.4g, failed%s", high.Rate, limited)
	}
	return c, below
}

// Best returns the places of the capacities that no other exceeds, in their order: more than one is a tie. It is empty when none
// met the SLO.
func Best(all []Capacity) []int {
	var best []int
	for i, c := range all {
		if !c.Met() {
			continue
		}
		order := 1
		if len(best) > 0 {
			order = cmp.Compare(c.Rate, all[best[0]].Rate)
		}
		switch {
		case order > 0:
			best = []int{i}
		case order == 0:
			best = append(best, i)
		}
	}
	return best
}
