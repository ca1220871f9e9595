package capacity

import (
	"math"
	"slices"
)

// A Population is what a workload brings in the long run: the arrivals at one request per second and the sizes of the requests.
// All have a mean of one. A few thousand of them are enough; they cost no server.
type Population struct {
	Due    []float64 // seconds, ascending
	Prompt []float64 // size of the prompts of as many requests, in their order
	Answer []float64 // likewise of the answers
}

// A fluctuation is how the load around requests is spread in the long run: as many parts of equal size, each with its mean surplus.
type fluctuation []float64

// parts are enough for a share of a hundredth to be right within a few per cent.
const parts = 400

// at returns the fluctuation of the population's load at a rate. The slower the requests come, the fewer are within the
// kernel's reach, and the more the load around them varies.
func (p *Population) at(k kernel, rate float64) fluctuation {
	due := make([]float64, len(p.Due))
	for i, at := range p.Due {
		due[i] = at / rate
	}
	edge := min(int(4*k.tau*rate), len(due)/4) // where one side is cut off
	all := Stretch{Due: due, Prompt: p.Prompt, Answer: p.Answer, First: edge, Counted: len(due) - 2*edge}.surplus(k, rate)
	slices.Sort(all)
	if len(all) <= parts {
		return all
	}
	f := make(fluctuation, parts)
	for i := range f {
		from, to := i*len(all)/parts, (i+1)*len(all)/parts
		for _, s := range all[from:to] {
			f[i] += s / float64(to-from)
		}
	}
	return f
}

// share returns the long-run share of requests that break the limit at a rate, and its gradient in the coefficients of the fit.
// That in ln rate is the one in a times the steepness.
func (f fit) share(load fluctuation, logRate float64) (share float64, gradient [3]float64) {
	if len(load) == 0 { // nothing is known of the fluctuation: there is none
		load = fluctuation{0}
	}
	for _, surplus := range load {
		o := observation{logRate: logRate, surplus: surplus}
		z, by := f.z(o)
		share += normal(z)
		for i := range by {
			gradient[i] += density(z) * by[i]
		}
	}
	n := float64(len(load))
	for i := range gradient {
		gradient[i] /= n
	}
	return share / n, gradient
}

// farthest is how far from the probes a boundary is looked for, in ln rate: a factor of 3.
const farthest = 1.1

// boundary returns ln of the rate at which the allowed share of requests breaks the limit in the long run, and the gradient of
// that in the coefficients. ok is false where the share does not grow with the rate, or the boundary is out of reach.
func (f fit) boundary(p *Population, allowed float64) (logRate float64, gradient [3]float64, ok bool) {
	logRate = f.center
	for range 2 { // the second time with the fluctuation of the right rate
		var load fluctuation
		if p != nil {
			load = p.at(f.kernel, math.Exp(logRate))
		}
		low, high := f.center-farthest, f.center+farthest
		if least, _ := f.share(load, low); least > allowed {
			return 0, gradient, false
		}
		if most, _ := f.share(load, high); most < allowed {
			return 0, gradient, false
		}
		for high-low > 1e-5 {
			logRate = (low + high) / 2
			if share, _ := f.share(load, logRate); share > allowed {
				high = logRate
			} else {
				low = logRate
			}
		}
		_, by := f.share(load, logRate)
		for i := range gradient {
			gradient[i] = -by[i] / (by[0] * f.steepness())
		}
	}
	return logRate, gradient, true
}
