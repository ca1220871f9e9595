package capacity

import (
	"fmt"
	"slices"
	"strings"

	"vllmtuner/render"
)

// A Step is one load of a search or a sweep, with the outcome of its probe. The load is a rate in requests per second.
// In a sweep over a closed loop it is a number of requests in flight.
type Step struct {
	Rate float64 `json:"rate"`
	Outcome
}

// Highest returns the capacity of a sweep. Its Rate is the highest load that passed. High is the lowest load above Rate
// that failed; loads between the two were not measured. A step with a late load generator is neither a pass nor a fail.
// If such a step lies between Rate and High, the capacity is AtLeast and Limited. If such a step lies below High and
// nothing passed, the capacity has no Bound.
//
// The second result, failedBelow, has the failed loads under Rate in ascending order. If there are any, the verdicts
// are not monotone, and the capacity depends on chance. Without steps the capacity is zero, and has no Bound.
func Highest(steps []Step) (c Capacity, failedBelow []float64) {
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
			failedBelow = append(failedBelow, s.Rate)
		case high == nil || s.Rate < high.Rate:
			high = s
		}
	}
	slices.Sort(failedBelow)
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
			c.Why = fmt.Sprintf("failed at %s by %s; nothing is known about lower loads", render.Rate(high.Rate), high.Binding)
		}
	case low == nil:
		c.Rate, c.Bound, c.Binding, c.InFlight = high.Rate, AtMost, high.Binding, high.InFlight
		c.Why = fmt.Sprintf("failed at the lowest load, %s, by %s", render.Rate(high.Rate), high.Binding)
	default:
		c.Rate, c.Low, c.Bound, c.Binding, c.InFlight = low.Rate, low.Rate, AtLeast, low.Binding, low.InFlight
		switch {
		case late != "" && high != nil:
			c.Limited, c.Why = late, fmt.Sprintf("passed at %s and failed at %s", render.Rate(low.Rate), render.Rate(high.Rate))
		case late != "":
			c.Limited, c.Why = late, "passed at "+render.Rate(low.Rate)
		case high != nil:
			c.Bound, c.Binding = Exact, high.Binding
			c.Why = fmt.Sprintf("the next load of the grid, %s, failed", render.Rate(high.Rate))
		default:
			c.Why = "passed at the highest load, " + render.Rate(low.Rate)
		}
	}
	if all != "" {
		c.Why += "; not decided at " + all
	}
	return c, failedBelow
}

// lateBetween returns two texts. The first text, reason, says why the load generator was late at a load between low and
// high; "" if it was not. If low or high is nil, that side has no end. The second text, list, has every load at which
// the generator was late.
func lateBetween(steps []Step, low, high *Step) (reason, list string) {
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
			reason = s.Limited
		}
	}
	slices.Sort(loads)
	words := make([]string, len(loads))
	for i, load := range loads {
		words[i] = fmt.Sprintf("%s (%s)", render.Rate(load), reasons[load])
	}
	return reason, strings.Join(words, ", ")
}
