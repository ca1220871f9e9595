package capacity

import (
	"math"
	"slices"
	"sync"
)

// A Population is what a workload brings in the long run: the arrivals at one request per second and the sizes of the requests.
// All have a mean of one. They cost no server, and it takes many: with 16,000 of them the share of requests that meet a rare load is so
// much a matter of chance that capacities differ by 1 % (standard deviation) from one draw of them to another, with 128,000 by 0.4 %.
type Population struct {
	Due    []float64 // seconds, ascending
	Prompt []float64 // size of the prompts of as many requests, in their order
	Answer []float64 // likewise of the answers

	mu    sync.Mutex
	known map[window]fluctuation
}

// A window is what a fluctuation is seen through.
type window struct {
	kernel
	rate int // ln, in steps of rateStep
}

// rateStep is how much ln rate may differ for loads to fluctuate alike: as the root of the requests within reach.
const rateStep = 0.02

// A fluctuation is how the load around requests is spread in the long run.
type fluctuation []bin

// A bin is the requests with about the same load around them.
type bin struct {
	surplus float64
	part    float64 // of the requests
}

// even is a load that does not fluctuate.
var even = fluctuation{{0, 1}}

// at returns the fluctuation of the population's load at a rate. The slower the requests come, the fewer are within the
// kernel's reach, and the more the load around them varies.
func (p *Population) at(k kernel, rate float64) fluctuation {
	if p == nil || len(p.Due) == 0 { // nothing is known of it
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

// through makes the fluctuation.
func (p *Population) through(k kernel, rate float64) fluctuation {
	due := make([]float64, len(p.Due))
	for i, at := range p.Due {
		due[i] = at / rate
	}
	edge := min(int(4*k.tau*rate), len(due)/4) // where one side is cut off
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

// share returns the long-run share of requests that break the limit at a rate, and its gradient in the coefficients of the fit.
// That in ln rate is the one in a times the steepness.
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

// farthest is how far from the probes a boundary is looked for, in ln rate: a factor of 3.
const farthest = 1.1

// boundary returns ln of the rate at which the allowed share of requests breaks the limit in the long run, and the gradient of
// that in the coefficients. ok is false where the share does not grow with the rate, or the boundary is out of reach.
func (f fit) boundary(p *Population, allowed float64) (logRate float64, gradient [3]float64, ok bool) {
	logRate = f.center
	for range 2 { // the second time with the fluctuation of the right rate
		load := p.at(f.kernel, math.Exp(logRate))
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
