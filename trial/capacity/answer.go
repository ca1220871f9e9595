package capacity

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"vllmtuner/render"
)

// deviations says how many standard deviations on each side of the mean hold 95 % of a normal distribution.
const deviations = 1.96

// halfWidth is half the width of a rate's 95 % interval, as a fraction of the rate. The parameter stdErr is the
// standard error of ln rate.
func halfWidth(stdErr float64) float64 { return math.Exp(deviations*stdErr) - 1 }

// byRate returns the steps in ascending order of their rates. At equal rates the failed steps come first, so that the
// order in which the steps were measured does not matter.
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

// answer returns the capacity that the steps so far show. The parameter why is the reason for the end of the search.
func (l *searchState) answer(why string) (Capacity, error) {
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
		return Capacity{}, fmt.Errorf("%w, already at %s req/s: %s", ErrLimited, render.Rate(limited.Rate), limited.Limited)
	case limited != nil:
		c.Limited, c.Why = limited.Limited, fmt.Sprintf("at %s req/s %s", render.Rate(limited.Rate), limited.Limited)
	case high == nil:
	case low == nil:
		c.Rate, c.Bound, c.Binding, c.InFlight = high.Rate, AtMost, high.Binding, high.InFlight
	default:
		c.Bound, c.Binding = Exact, high.Binding
		c.Rate = interpolate(low, high)
	}
	l.addInterval(&c)
	if low != nil && c.Bound == Exact {
		// Little's law: requests in flight grow in proportion to the rate, because the time of a request hardly changes
		// between neighbouring rates.
		c.InFlight = low.InFlight * c.Rate / low.Rate
	}
	return c, nil
}

// limited returns the step whose late load generator decided the answer, or nil if there is none.
func (l *searchState) limited() (step *Step) {
	switch {
	case l.high != nil && l.high.Limited != "":
		return l.high
	case l.low != nil && l.low.Limited != "":
		return l.low
	case l.low != nil || l.high == nil:
		return nil
	}
	for i := range l.steps { // nothing passed: look for a lower rate at which the load generator was late
		if s := &l.steps[i]; s.Limited != "" && s.Rate < l.high.Rate && (step == nil || s.Rate < step.Rate) {
			step = s
		}
	}
	return step
}

// highestPass returns the highest rate up to limit at which a step passed with the load generator on time, or 0.
func highestPass(steps []Step, limit float64) (rate float64) {
	for _, s := range steps {
		if s.passed() && s.Rate <= limit {
			rate = max(rate, s.Rate)
		}
	}
	return rate
}

// addInterval replaces the interpolated rate with the estimate from all requests, and adds the interval.
func (l *searchState) addInterval(c *Capacity) {
	e, ok := l.estimate()
	if l.Race.active() && !(c.Bound == AtLeast && c.Low >= l.Max) { // Max is the highest rate offered, so a pass there is only a lower bound
		if rate, stdErr, ratioErr, tells := l.againstBest(); tells && c.Limited == "" {
			c.raced(rate, stdErr, &e)
			c.RatioErr = ratioErr
		}
		return
	}
	if !ok || c.Bound == Exact && !l.bracketed() {
		return
	}
	rate := math.Exp(e.logRate)
	switch c.Bound {
	case Exact:
		c.Rate, c.Binding = rate, e.limit
		c.setError(e.stdErr, e.pieces)
		l.reconcile(c)
		if now := halfWidth(e.stdErr); l.Precision > 0 && now > 1.1*l.Precision {
			c.addDoubt("it is known to ±%s %%; ±%s %% was wanted", render.Digits(100*now, 2), render.Digits(100*l.Precision, 2))
		}
	case AtLeast:
		c.Lowest = min(c.Low, rate*math.Exp(-deviations*e.stdErr))
	}
}

// setError sets the standard error and the interval of a rate that was estimated from all requests.
func (c *Capacity) setError(stdErr float64, pieces []Piece) {
	c.StdErr, c.Pieces = stdErr, pieces
	c.Lowest, c.Highest = c.Rate*math.Exp(-deviations*stdErr), c.Rate*math.Exp(deviations*stdErr)
}

// raced sets the rate that a race has found, in place of a bound. A pass alone is no capacity, because the requests of
// its draw (one set of random requests) may have been easy.
func (c *Capacity) raced(rate, stdErr float64, e *estimate) {
	if c.Bound == Exact { // the server's own verdicts overrule a comparison that contradicts them
		off := math.Exp(stdErr)
		rate = min(max(rate, c.Low/off), c.High*off)
	} else {
		c.Bound = Estimated
	}
	c.Rate = rate
	c.setError(stdErr, e.pieces)
}

// reconcile sets the bracket to the nearest verdicts that agree with the estimated rate. It adds a doubt if verdicts
// contradict the rate.
//
// A verdict comes from one draw (one set of random requests), and the estimate comes from all requests. So the
// estimated rate may lie below a rate that passed, or above a rate that failed. It may lie outside the bracket by at
// most its standard error, because a fit that is farther off has the wrong shape. The rate is not raised to the highest
// rate that passed, because that pass may be luck.
func (l *searchState) reconcile(c *Capacity) {
	rate := c.Rate
	var pass, fail *Step // the nearest steps whose verdicts agree with the rate
	var contrary []float64
	sorted := byRate(inTime(l.steps))
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
	if pass == nil || fail == nil { // no lower step passed, or no higher step failed
		c.addDoubt("the estimate from all requests, %s req/s, lies outside the rates that passed and failed", render.Rate(rate))
		off := math.Exp(c.StdErr)
		c.Rate = min(max(rate, c.Low/off), c.High*off)
		c.Lowest, c.Highest = min(c.Lowest, c.Rate), max(c.Highest, c.Rate)
		return
	}
	c.Low, c.High = pass.Rate, fail.Rate
	if len(contrary) > 0 {
		c.addDoubt("%s this; it may be chance", contradiction(contrary, len(sorted)))
	}
}

func (c *Capacity) addDoubt(format string, args ...any) {
	if c.Doubt != "" {
		c.Doubt += "; "
	}
	c.Doubt += fmt.Sprintf(format, args...)
}

// contradiction names the probes that contradict the answer. It takes the rates of these probes in ascending order, and
// the number of all probes.
func contradiction(contrary []float64, allProbes int) string {
	const few = 3
	if len(contrary) == 1 {
		return fmt.Sprintf("one probe, at %s req/s, contradicts", render.Rate(contrary[0]))
	}
	distinct := slices.Compact(slices.Clone(contrary)) // the rates are sorted
	if len(distinct) > few {
		return fmt.Sprintf("%d of %d probes, at %s to %s req/s, contradict", len(contrary), allProbes, render.Rate(distinct[0]), render.Rate(distinct[len(distinct)-1]))
	}
	words := make([]string, len(distinct))
	for i, rate := range distinct {
		words[i] = render.Rate(rate)
	}
	return fmt.Sprintf("%d of %d probes, at %s req/s, contradict", len(contrary), allProbes, strings.Join(words, " and "))
}

// interpolate returns the rate at which the headroom crosses zero, if the headroom is linear in ln rate.
func interpolate(low, high *Step) float64 {
	part := low.Headroom / (low.Headroom - high.Headroom)
	if !(part >= 0 && part <= 1) { // the headrooms have the wrong signs
		part = 0.5
	}
	return low.Rate * math.Pow(high.Rate/low.Rate, part)
}
