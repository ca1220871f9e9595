package workload

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"
)

// Arrivals says how the gaps between arrivals are spread about their mean. The zero value is a Poisson process.
type Arrivals struct {
	// Burstiness is the shape of gamma-distributed gaps, as vllm bench serve has it: 1 is Poisson, larger is smoother,
	// +Inf is constant, below 1 is burstier. 0 means 1.
	Burstiness float64

	// Trace gives the gaps of recorded traffic instead: divided by their mean, so that the rate is the caller's, from a seeded
	// place on and round and round. Over a part of the trace the rate then swings as it did when it was recorded.
	Trace *Trace
}

// Check says why arrivals cannot be drawn, or nil.
func (a Arrivals) Check() error {
	switch {
	case !(a.Burstiness >= 0):
		return fmt.Errorf("burstiness %g: must be above 0; 1 is Poisson, larger is smoother", a.Burstiness)
	case a.Trace != nil && a.Burstiness != 0:
		return errors.New("burstiness and the gaps of a trace exclude each other: leave one out")
	case a.Trace != nil && !(a.Trace.meanGap() > 0):
		return fmt.Errorf("%s has no gaps between its arrivals: take a trace with two timestamps at least", a.Trace.Name())
	}
	return nil
}

// gaps returns the gaps between arrivals at unit rate. Arrivals that Check refuses are Poisson.
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

// gamma draws from the gamma distribution with the shape and scale 1 (Marsaglia and Tsang, A simple method for generating
// gamma variables, 2000). It is written here so that no upgrade of a library changes the arrivals of a stored study.
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

// A clock is the arrivals of one phase. Gaps are drawn at unit rate and divided by the rate, so that every rate sees the
// same pattern: differences between two rates are then the server's and not the draw's.
type clock struct {
	gap  func() float64
	rate float64
	unit float64 // unit-rate time of the last arrival
}

// next returns the time of the next arrival since the beginning of the phase, or never where that is farther away than a Duration
// can say.
func (c *clock) next() time.Duration {
	c.unit += c.gap()
	return time.Duration(min(c.unit/c.rate*float64(time.Second), float64(never)))
}

// never is a century.
const never = 876_000 * time.Hour
