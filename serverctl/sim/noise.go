package sim

import "math"

// Noise is what makes a step take another time than the equation says. It depends on the seed and the step's number alone.
type Noise struct {
	Relative float64 // standard deviation of the factor on a step's time
	Jitter   float64 // mean of an exponential time on top of each step, ms
	Stall    float64 // a rare pause, ms
	StallGap float64 // mean time of computing between two stalls, s; 0 means none
}

// The streams of random numbers of one step.
const (
	jitterStream = iota + 1
	stallStream
	radiusStream
	angleStream
)

// disturb returns the time of a step in milliseconds with its noise.
func (n Noise) disturb(ms float64, seed uint64, step int) float64 {
	number := uint64(step)
	if n.Relative > 0 {
		ms *= max(0.5, 1+n.Relative*normal(uniform(seed, number, radiusStream), uniform(seed, number, angleStream)))
	}
	if n.Jitter > 0 {
		ms -= n.Jitter * math.Log(1-uniform(seed, number, jitterStream))
	}
	if n.StallGap > 0 && uniform(seed, number, stallStream) < ms/1000/n.StallGap {
		ms += n.Stall
	}
	return ms
}

// normal turns two uniform numbers into one with mean 0 and variance 1 (Box and Muller, 1958).
func normal(u, v float64) float64 {
	return math.Sqrt(-2*math.Log(1-u)) * math.Cos(2*math.Pi*v)
}
