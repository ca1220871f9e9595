package workload

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Arrivals is the distribution of the gaps between arrivals. The zero value is a Poisson process.
type Arrivals struct {
	// Burstiness is the shape of gamma-distributed gaps, as in vllm bench serve: 1 is Poisson, larger is smoother, +Inf is
	// constant, below 1 is burstier. 0 means 1.
	Burstiness float64

	// Trace replaces this distribution by the gaps of recorded traffic. These gaps repeat in a cycle that starts at a
	// seeded gap. Each gap is divided by the mean gap, so the caller still sets the rate. Within the cycle the rate
	// varies as it did in the record.
	Trace *Trace
}

// Check returns an error if arrivals cannot be drawn.
func (a Arrivals) Check() error {
	switch {
	case !(a.Burstiness >= 0):
		return fmt.Errorf("burstiness %g: must be above 0; 1 is Poisson, larger is smoother", a.Burstiness)
	case a.Trace != nil && a.Burstiness != 0:
		return errors.New("burstiness and the gaps of a trace exclude each other: give only one")
	case a.Trace != nil && !(a.Trace.meanGap() > 0):
		return fmt.Errorf("%s has no gaps between its arrivals: use a trace with at least two timestamps", a.Trace.Name())
	}
	return nil
}

// gaps returns a function that draws gaps between arrivals, with a mean of 1. A trace without gaps is ignored. A
// burstiness that Check refuses counts as 1.
func (a Arrivals) gaps(draw *rand.Rand) func() float64 {
	switch {
	case a.Trace != nil && a.Trace.meanGap() > 0:
		times, mean := a.Trace.times, a.Trace.meanGap()
		at := draw.IntN(len(times) - 1)
		return func() float64 {
			gap := float64(times[at+1]-times[at]) / mean
			at = (at + 1) % (len(times) - 1)
			return gap
		}
	case math.IsInf(a.Burstiness, 1):
		return func() float64 { return 1 }
	case a.Burstiness > 0 && a.Burstiness != 1:
		return func() float64 { return gamma(draw, a.Burstiness) / a.Burstiness }
	}
	return draw.ExpFloat64
}

// gamma draws from the gamma distribution with the given shape and scale 1 (Marsaglia and Tsang, A simple method for
// generating gamma variables, 2000). The algorithm is written here, because an upgrade of a library could change the
// arrivals of a stored study.
func gamma(r *rand.Rand, shape float64) float64 {
	if shape < 1 {
		return gamma(r, shape+1) * math.Pow(r.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v *= v * v
		if math.Log(r.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}

// A clock gives the arrival times of one phase. It draws gaps with a mean of 1 and divides them by the rate, so every
// rate gets the same pattern. If two rates differ in their results, the server is the reason and not the random gaps.
type clock struct {
	gap  func() float64
	rate float64
	unit float64 // time of the last arrival at a rate of 1
}

// next returns the time of the next arrival since the start of the phase. If the time is too long for a Duration, next
// returns neverDue.
func (c *clock) next() time.Duration {
	c.unit += c.gap()
	return time.Duration(min(c.unit/c.rate*float64(time.Second), float64(neverDue)))
}

// dueTimes returns a function for a phase that begins at the given time. Each call of that function returns the time of
// the next arrival.
func (c *clock) dueTimes(start time.Duration) func() time.Duration {
	return func() time.Duration { return start + c.next() }
}

// neverDue is a due time that no run reaches: 100 years.
const neverDue = 876_000 * time.Hour
