package capacity

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
)

// deviations of a normal distribution that hold 95 % of it.
const deviations = 1.96

// half is half the width of the 95 % interval of a rate as a part of it, given the standard error of its logarithm.
func half(stdErr float64) float64 { return math.Exp(deviations*stdErr) - 1 }

// byRate returns the steps in ascending order of their rates, at equal rates the fails first: a pass and a fail there say the same in
// either order.
func byRate(steps []Step) []Step {
	passed := func(s Step) int {
		if s.passed() {
			return 1
		}
		return 0
	}
	return slices.SortedStableFunc(slices.Values(steps), func(a, b Step) int {
		return cmp.Or(cmp.Compare(a.Rate, b.Rate), cmp.Compare(passed(a), passed(b)))
	})
}

// place is where the steps as a whole put the boundary. ok is false where they do not: requests were not judged one by one, or too
// few were slow.
func place(steps []Step, p *Population) (lowest estimate, ok bool) {
	var probes []*Evidence
	for _, step := range steps {
		if step.Limited != "" {
			continue
		}
		if step.Evidence == nil {
			return lowest, false
		}
		probes = append(probes, step.Evidence)
	}
	if len(probes) == 0 {
		return lowest, false
	}
	for _, e := range estimateAll(probes, p) {
		if !ok || e.logRate < lowest.logRate {
			lowest, ok = e, true
		}
	}
	return lowest, ok
}

// answer makes the capacity of what is known.
func (l *looking) answer(why string) (Capacity, error) {
	c := Capacity{Probes: len(l.steps), Why: why, Steps: l.steps}
	low, high := l.low, l.high
	if low != nil {
		c.Rate, c.Binding, c.InFlight, c.Bound = low.Rate, low.Binding, low.InFlight, AtLeast
		c.Low = highestPass(l.steps, low.Rate)
	}
	if high != nil && high.Limited == "" {
		c.High = high.Rate
	}
	switch limited := l.limited(); {
	case limited != nil && low == nil:
		return Capacity{}, fmt.Errorf("%w, already at %.4g req/s: %s", ErrLimited, limited.Rate, limited.Limited)
	case limited != nil:
		c.Limited, c.Why = limited.Limited, fmt.Sprintf("at %.4g req/s %s", limited.Rate, limited.Limited)
	case high == nil:
	case low == nil:
		c.Rate, c.Bound, c.Binding, c.InFlight = high.Rate, AtMost, high.Binding, high.InFlight
	default:
		c.Bound, c.Binding = Exact, high.Binding
		c.Rate = interpolate(low, high)
	}
	l.sure(&c)
	if low != nil && c.Bound == Exact {
		// Little's law: between neighbouring rates the time in the system hardly changes.
		c.InFlight = low.InFlight * c.Rate / low.Rate
	}
	return c, nil
}

// limited is a step in which the load generator decided the answer; nil when it did not.
func (l *looking) limited() (step *Step) {
	switch {
	case l.high != nil && l.high.Limited != "":
		return l.high
	case l.low != nil && l.low.Limited != "":
		return l.low
	case l.low != nil || l.high == nil:
		return nil
	}
	for i := range l.steps { // what failed is not the lowest rate that was offered
		if s := &l.steps[i]; s.Limited != "" && s.Rate < l.high.Rate && (step == nil || s.Rate < step.Rate) {
			step = s
		}
	}
	return step
}

// highestPass is the highest rate up to most that passed with the load generator in time; 0 when none did.
func highestPass(steps []Step, most float64) (rate float64) {
	for _, s := range steps {
		if s.passed() && s.Rate <= most {
			rate = max(rate, s.Rate)
		}
	}
	return rate
}

// sure gives the capacity its place by all probes, and its interval.
func (l *looking) sure(c *Capacity) {
	e, ok := l.estimate()
	if !ok || c.Bound == Exact && !l.bracketed() {
		return
	}
	rate := math.Exp(e.logRate)
	switch c.Bound {
	case Exact:
		c.Rate, c.Binding = l.within(rate, c), e.limit
		c.StdErr, c.Pieces = e.stdErr, e.pieces
		if now := half(e.stdErr); l.Precision > 0 && now > 1.1*l.Precision {
			c.addDoubt("it is known to ±%.2g %%, and ±%.3g %% was asked for", 100*now, 100*l.Precision)
		}
		c.Lowest, c.Highest = rate*math.Exp(-deviations*e.stdErr), rate*math.Exp(deviations*e.stdErr)
		c.Lowest, c.Highest = min(c.Lowest, c.Rate), max(c.Highest, c.Rate)
	case AtLeast:
		c.Lowest = min(c.Low, rate*math.Exp(-deviations*e.stdErr))
	}
}

// within brings the rate between a step that passed and one that failed, and says what contradicts it.
func (l *looking) within(rate float64, c *Capacity) float64 {
	var pass, fail *Step // nearest to the rate
	var contrary []float64
	sorted := byRate(intime(l.steps))
	for i := range sorted {
		step := &sorted[i]
		switch {
		case step.passed() && step.Rate <= rate:
			pass = step
		case !step.passed() && step.Rate >= rate && fail == nil:
			fail = step
		case step.passed() != (step.Rate < rate):
			contrary = append(contrary, step.Rate)
		}
	}
	if pass == nil || fail == nil { // all verdicts on one side are against it: it is as far out as they allow
		c.addDoubt("the requests as a whole say %.4g req/s, beyond all verdicts", rate)
		return min(max(rate, c.Low), c.High)
	}
	c.Low, c.High = pass.Rate, fail.Rate
	if len(contrary) > 0 {
		c.addDoubt("%s, by luck if the other probes are right", contradiction(contrary, len(sorted)))
	}
	return rate
}

// addDoubt says something more against the answer.
func (c *Capacity) addDoubt(format string, args ...any) {
	if c.Doubt != "" {
		c.Doubt += "; "
	}
	c.Doubt += fmt.Sprintf(format, args...)
}

// contradiction says at which rates verdicts say otherwise than the answer, of how many.
func contradiction(contrary []float64, of int) string {
	const few = 3
	if len(contrary) == 1 {
		return fmt.Sprintf("a verdict at %.4g req/s says otherwise", contrary[0])
	}
	distinct := slices.Compact(slices.Clone(contrary)) // they are in their order
	if len(distinct) > few {
		return fmt.Sprintf("%d of %d verdicts, at %.4g to %.4g req/s, say otherwise", len(contrary), of, distinct[0], distinct[len(distinct)-1])
	}
	words := make([]string, len(distinct))
	for i, rate := range distinct {
		words[i] = fmt.Sprintf("%.4g", rate)
	}
	return fmt.Sprintf("%d of %d verdicts, at %s req/s, say otherwise", len(contrary), of, strings.Join(words, " and "))
}

// interpolate returns the rate at which the headroom crosses zero, linear in log rate.
func interpolate(low, high *Step) float64 {
	part := low.Headroom / (low.Headroom - high.Headroom)
	if !(part >= 0 && part <= 1) { // headrooms of the wrong sign say nothing of where
		part = 0.5
	}
	return low.Rate * math.Pow(high.Rate/low.Rate, part)
}
