package capacity

import (
	"fmt"
	"slices"
	"strings"
)

// A Step is one load of a search or a sweep, with the outcome of its probe. The load is a rate in requests per second.
// In a sweep over a closed loop it is a number of requests in flight.
type Step struct {
	Rate float64 `json:"rate"`
	Outcome
}

// Highest returns the capacity of a sweep. Its Rate is the highest load that passed. High is the lowest load above it
// that failed; loads between the two were not measured. A step with a late load generator is neither a pass nor a fail.
// If such a step lies between Rate and High, the capacity is AtLeast and Limited. If it lies below High and nothing
// passed, the capacity has no Bound.
//
// below are the failed loads under Rate, ascending. If there are any, the verdicts are not monotone, and the capacity
// depends on chance. Without steps the capacity is zero, and has no Bound.
func Highest(steps []Step) (c Capacity, below []float64) {
	c.Probes = len(steps)
	var low, high *Step
	for i := range steps {
		if s := &steps[i]; s.passed() && (low == nil || s.Rate > low.Rate) {
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
	if high != nil {
		c.High = high.Rate
	}
	late, all := lateBetween(steps, low, high)
	switch {
	case len(steps) == 0:
		c.Why = "nothing was measured"
	case late != "" && low == nil:
		c.Limited, c.Why = late, "the load generator was late at every load"
		if high != nil {
			c.Why = fmt.Sprintf("failed at %.4g by %s; nothing is known about lower loads", high.Rate, high.Binding)
		}
	case low == nil:
		c.Rate, c.Bound, c.Binding, c.InFlight = high.Rate, AtMost, high.Binding, high.InFlight
		c.Why = fmt.Sprintf("failed at the lowest load, %.4g, by %s", high.Rate, high.Binding)
	default:
		c.Rate, c.Low, c.Bound, c.Binding, c.InFlight = low.Rate, low.Rate, AtLeast, low.Binding, low.InFlight
		switch {
		case late != "" && high != nil:
			c.Limited, c.Why = late, fmt.Sprintf("passed at %.4g and failed at %.4g", low.Rate, high.Rate)
		case late != "":
			c.Limited, c.Why = late, fmt.Sprintf("passed at %.4g", low.Rate)
		case high != nil:
			c.Bound, c.Binding = Exact, high.Binding
			c.Why = fmt.Sprintf("the next load of the grid, %.4g, failed", high.Rate)
		default:
			c.Why = fmt.Sprintf("passed at the highest load, %.4g", low.Rate)
		}
	}
	if all != "" {
		c.Why += "; not decided at " + all
	}
	return c, below
}

// lateBetween returns two texts. between says why the load generator was late at a load between low and high, or is "".
// all lists every load at which it was late. If low or high is nil, that side has no end.
func lateBetween(steps []Step, low, high *Step) (between, all string) {
	var loads []float64
	reasons := map[float64]string{}
	for _, s := range steps {
		if s.Limited == "" {
			continue
		}
		if reasons[s.Rate] == "" {
			loads = append(loads, s.Rate)
			reasons[s.Rate] = s.Limited
		}
		if (low == nil || s.Rate > low.Rate) && (high == nil || s.Rate < high.Rate) {
			between = s.Limited
		}
	}
	slices.Sort(loads)
	words := make([]string, len(loads))
	for i, load := range loads {
		words[i] = fmt.Sprintf("%.4g (%s)", load, reasons[load])
	}
	return between, strings.Join(words, ", ")
}
