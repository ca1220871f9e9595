package sim

import "math"

// Noise changes the time of a step at random. It depends only on the seed and on the step's number.
type Noise struct {
	Relative float64 // standard deviation of the random factor on a step's time
	Jitter   float64 // mean of a random time that is added to each step (exponential distribution), ms
	Stall    float64 // length of a rare pause, ms
	StallGap float64 // mean computing time between two pauses, s; 0 means no pauses
}

// Each kind of random number in a step comes from its own stream.
const (
	jitterStream = iota + 1
	stallStream
	radiusStream
	angleStream
)

// add adds noise to the time of a step, in milliseconds, and returns the new time.
func (n Noise) add(ms float64, seed uint64, step int) float64 {
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

// normal turns two uniform numbers into a normally distributed number with mean 0 and variance 1 (Box and Muller,
// 1958).
func normal(u, v float64) float64 {
	return math.Sqrt(-2*math.Log(1-u)) * math.Cos(2*math.Pi*v)
}
