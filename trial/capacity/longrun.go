package capacity

import (
	"math"
	"slices"
	"sync"
)

// A Population is a workload in the long run: the arrivals at one request per second, and the sizes of the requests.
// Each mean is one. A population needs no server, but many requests, because rare loads decide a capacity. Capacities
// from different populations of 16,000 requests differ by 1 % (standard deviation), and of 128,000 by 0.4 %.
type Population struct {
	Due    []float64 // seconds, ascending
	Prompt []float64 // size of each prompt, in the order of Due
	Answer []float64 // size of each answer, in the order of Due

	mu    sync.Mutex
	known map[window]fluctuation
}

// A window says for which kernel and rate a fluctuation holds.
type window struct {
	kernel
	rate int // ln, in steps of rateStep
}

// rateStep is a difference in ln(rate). Loads whose rates differ by less fluctuate about equally: the fluctuation
// depends only on the square root of the number of requests within a kernel.
const rateStep = 0.02

// A fluctuation is the distribution of the load around requests in the long run.
type fluctuation []bin

// A bin holds the requests with about the same load around them.
type bin struct {
	surplus float64
	part    float64 // share of the requests
}

// even is the fluctuation of evenly spread requests of equal size.
var even = fluctuation{{0, 1}}

// at returns the fluctuation of the population's load at a rate. At a low rate few requests are within the kernel, and
// the load around them varies more.
func (p *Population) at(k kernel, rate float64) fluctuation {
	if p == nil || len(p.Due) == 0 {
		return even
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	through := window{k, int(math.Round(math.Log(rate) / rateStep))}
	f, ok := p.known[through]
	if !ok {
		if p.known == nil {
			p.known = make(map[window]fluctuation)
		}
		f = p.through(k, math.Exp(rateStep*float64(through.rate)))
		p.known[through] = f
	}
	return f
}

// through computes the fluctuation at a rate.
func (p *Population) through(k kernel, rate float64) fluctuation {
	due := make([]float64, len(p.Due))
	for i, at := range p.Due {
		due[i] = at / rate
	}
	edge := min(int(4*k.tau*rate), len(due)/4) // the requests at both ends have no load on one side
	all := Stretch{Due: due, Prompt: p.Prompt, Answer: p.Answer, First: edge, Counted: len(due) - 2*edge}.surplus(k, rate)
	least := slices.Min(all)
	f := make(fluctuation, int((slices.Max(all)-least)/binWidth)+1)
	for _, surplus := range all {
		b := &f[int((surplus-least)/binWidth)]
		b.surplus += surplus
		b.part++
	}
	f = slices.DeleteFunc(f, func(b bin) bool { return b.part == 0 })
	for i := range f {
		f[i].surplus /= f[i].part
		f[i].part /= float64(len(all))
	}
	return f
}

// share returns the long-run share of requests that break the limit at a rate, and its derivatives by the coefficients
// of the fit. The derivative of the share by ln rate is its derivative by a, times the steepness.
func (f fit) share(load fluctuation, logRate float64) (share float64, gradient [3]float64) {
	steep, passing := f.steepness(), f.passing()
	for _, bin := range load {
		z, by := f.zWith(observation{logRate: logRate, surplus: bin.surplus}, steep, passing)
		share += bin.part * normal(z)
		d := bin.part * density(z)
		for i := range by {
			gradient[i] += d * by[i]
		}
	}
	return share, gradient
}

// maxDistance is the greatest distance of a boundary from the probes, in ln rate: a factor of 3.
const maxDistance = 1.1

// boundary returns ln of the rate at which the allowed share of requests breaks the limit in the long run, and its
// gradient by the coefficients. ok is false where the share does not grow with the rate, and where the boundary is
// farther than maxDistance.
func (f fit) boundary(p *Population, allowed float64) (logRate float64, gradient [3]float64, ok bool) {
	logRate = f.center
	for range 2 { // the second time with the fluctuation at the rate that was found
		load := p.at(f.kernel, math.Exp(logRate))
		low, high := f.center-maxDistance, f.center+maxDistance
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
