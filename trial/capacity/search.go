package capacity

import (
	"context"
	"fmt"
	"math"
	"strconv"
)

// A Search is how to look for a capacity: gallop from a hint until a passing and a failing rate are known, halve the
// bracket in log rate, then interpolate on headroom. About four probes; on a simulated engine with windows of 120 s and a
// tolerance of 20 % the error of one search had an RMSE of 8 %.
type Search struct {
	Hint      float64 // first rate, requests per second
	Min, Max  float64 // rates are never outside
	Factor    float64 // of the first gallop step, > 1; the n-th in a row is Factor^n, so that a wrong hint costs little
	Tolerance float64 // stop when high/low - 1 is no more than this, > 0
	MaxProbes int     // stop after so many, with the bracket as it is; at least 1
}

// Find runs the search. It fails when a probe does.
func (s Search) Find(ctx context.Context, probe Probe) (Capacity, error) {
	var low, high *Step                // highest pass, lowest fail
	rate, probes := s.round(s.Hint), 0 // while there is no bracket, every probe is a step of the gallop
	for {
		outcome, err := probe(ctx, rate)
		if err != nil {
			return Capacity{}, err
		}
		probes++
		if outcome.Pass && outcome.Limited == "" {
			low = &Step{rate, outcome}
		} else {
			high = &Step{rate, outcome}
		}
		next, why := s.next(low, high, probes)
		switch {
		case why != "" && low == nil && high.Limited != "":
			return Capacity{}, fmt.Errorf("%w, already at %.4g req/s: %s", ErrLimited, high.Rate, high.Limited)
		case why != "":
			return answer(low, high, probes, why), nil
		}
		rate = next
	}
}

// next returns the rate to probe, or why the search is over.
func (s Search) next(low, high *Step, probes int) (rate float64, why string) {
	switch {
	case low != nil && low.Rate >= s.Max:
		return 0, fmt.Sprintf("passed at the highest rate, %.4g req/s", s.Max)
	case high != nil && high.Rate <= s.Min:
		return 0, fmt.Sprintf("failed at the lowest rate, %.4g req/s", s.Min)
	case low != nil && high != nil && high.Rate/low.Rate-1 <= s.Tolerance+1e-9:
		return 0, fmt.Sprintf("bracketed to %.0f %%", 100*(high.Rate/low.Rate-1))
	case probes >= s.MaxProbes:
		return 0, fmt.Sprintf("%d probes are spent", probes)
	case high == nil:
		return s.round(low.Rate * math.Pow(s.Factor, float64(probes))), ""
	case low == nil:
		return s.round(high.Rate / math.Pow(s.Factor, float64(probes))), ""
	}
	rate = s.round(math.Sqrt(low.Rate * high.Rate))
	if rate <= low.Rate || rate >= high.Rate {
		return 0, "the bracket is as narrow as three digits allow"
	}
	return rate, ""
}

// round keeps three significant digits, so that rates are readable and the same in every trial, and stays in Min..Max.
func (s Search) round(rate float64) float64 {
	r, err := strconv.ParseFloat(strconv.FormatFloat(rate, 'g', 3, 64), 64)
	if err != nil { // cannot be: the text was just made
		r = rate
	}
	return max(s.Min, min(s.Max, r))
}

// answer makes the capacity of what is known.
func answer(low, high *Step, probes int, why string) Capacity {
	c := Capacity{Probes: probes, Why: why}
	if low != nil {
		c.Low, c.Rate, c.Binding, c.InFlight, c.Bound = low.Rate, low.Rate, low.Binding, low.InFlight, AtLeast
	}
	if high != nil && high.Limited != "" {
		c.Why = fmt.Sprintf("at %.4g req/s %s", high.Rate, high.Limited)
		return c
	}
	if high != nil {
		c.High, c.Binding = high.Rate, high.Binding
	}
	switch {
	case low == nil:
		c.Rate, c.Bound, c.InFlight = high.Rate, AtMost, high.InFlight
	case high != nil:
		c.Bound = Exact
		c.Rate = interpolate(low, high)
		// Little's law: between neighbouring rates the time in the system hardly changes.
		c.InFlight = low.InFlight * c.Rate / low.Rate
	}
	return c
}

// interpolate returns the rate at which the headroom crosses zero, linear in log rate.
func interpolate(low, high *Step) float64 {
	part := low.Headroom / (low.Headroom - high.Headroom)
	if !(part >= 0 && part <= 1) { // headrooms of the wrong sign say nothing of where
		part = 0.5
	}
	return low.Rate * math.Pow(high.Rate/low.Rate, part)
}
