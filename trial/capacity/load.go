package capacity

import (
	"math"
	"slices"
	"sync"
)

// A Stretch is the load that one probe offered: when each request was due and how much work it brought. The stretch
// follows from the schedule, without a server. It contains the uncounted requests too, because counted requests wait
// behind them.
type Stretch struct {
	Due    []float64 // seconds since the probe began, ascending
	Prompt []float64 // size of each prompt, relative to the mean of the workload
	Answer []float64 // size of each answer, relative to the mean of the workload

	First, Counted int // the counted requests are Due[First : First+Counted]
}

// A kernel says how much the work of other requests affects a request. A time to first token depends on the work before
// the request. A time per token also depends on the work that comes while the answer is generated.
type kernel struct {
	tau    float64 // seconds over which the weight of other work falls to 1/e
	around bool    // whether later work counts, as much as earlier work
	prompt float64 // weight of prompts in the work, 0 to 1; answers weigh 1 - prompt
}

// kernels returns the kernels that a fit tries; the fit keeps the best. The shortest tau is a few steps of an engine.
// The longest tau is a third of an ordinary lead-in. With a longer tau, every window would seem to begin with less than
// the mean load.
func kernels() (all []kernel) {
	for tau := 0.625; tau <= 20; tau *= 2 {
		all = append(all, kernel{tau, false, 0.5}, kernel{tau, true, 0.5})
	}
	return all
}

// mixes returns two variants of k: the first counts only answers in the load, the second only prompts.
func (k kernel) mixes() []kernel {
	return []kernel{{k.tau, k.around, 0}, {k.tau, k.around, 1}}
}

// idle is added to each load (divided by the rate), because the logarithm of no load would be infinite.
const idle = 0.02

// surplus returns, for each counted request, ln of the load around it divided by the rate of the probe. It is 0 where
// the other requests brought as much work as evenly spread requests of mean size. A request's own work is left out.
// Before the stretch there was no load, because a probe begins on an idle server. After the stretch the mean load is
// assumed.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (s Stretch) surplus(k kernel, rate float64) []float64 {
	if s.Counted == 0 {
		return nil
	}
	around, work := make([]float64, len(s.Due)), make([]float64, len(s.Due))
	for i := range work {
		work[i] = k.prompt*s.Prompt[i] + (1-k.prompt)*s.Answer[i]
	}
	mean := rate * k.tau // long-run mean of the variable sum, which is the decayed work on one side of a request
	sum := 0.0
	for i := 1; i < len(s.Due); i++ {
		sum = (sum + work[i-1]) * math.Exp((s.Due[i-1]-s.Due[i])/k.tau)
		around[i] = sum
	}
	if k.around {
		sum, mean = mean, 2*mean
		around[len(around)-1] += sum
		for i := len(s.Due) - 2; i >= 0; i-- {
			sum = (sum + work[i+1]) * math.Exp((s.Due[i]-s.Due[i+1])/k.tau)
			around[i] += sum
		}
	}
	counted := around[s.First : s.First+s.Counted]
	for i := range counted {
		counted[i] = math.Log(counted[i]/mean + idle)
	}
	return counted
}

// A Population is a workload in the long run: arrivals at one request per second, and sizes of requests with a mean of
// 1. A population needs no server, but many requests, because rare loads decide a capacity. Capacities from different
// populations of 16,000 requests differ by 1 % (standard deviation). With 128,000 requests they differ by 0.4 %.
type Population struct {
	Due    []float64 // seconds, ascending
	Prompt []float64 // size of each prompt, in the order of Due
	Answer []float64 // size of each answer, in the order of Due

	mu    sync.Mutex
	known map[window]fluctuation
}

// A window is the kernel and the rate for which a fluctuation was computed.
type window struct {
	kernel
	rate int // ln(rate), in steps of rateStep
}

// rateStep is a difference in ln(rate). Rates that differ by less have about the same fluctuation, which depends only
// on the square root of the number of requests within a kernel.
const rateStep = 0.02

// A fluctuation is the distribution of the load around requests in the long run.
type fluctuation []bin

// A bin holds the requests with about the same load around them.
type bin struct {
	surplus float64
	share   float64 // fraction of the requests
}

// evenLoad is the fluctuation of evenly spread requests of equal size.
var evenLoad = fluctuation{{0, 1}}

// fluctuationAt returns the fluctuation of the population's load at a rate. At a low rate few requests are due within
// the kernel's tau, so the load around them varies more.
func (p *Population) fluctuationAt(k kernel, rate float64) fluctuation {
	if p == nil || len(p.Due) == 0 {
		return evenLoad
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := window{k, int(math.Round(math.Log(rate) / rateStep))}
	return remembered(&p.known, at, func() fluctuation { return p.computeFluctuation(k, math.Exp(rateStep*float64(at.rate))) })
}

// computeFluctuation computes the fluctuation at a rate. fluctuationAt keeps the result in p.known.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (p *Population) computeFluctuation(k kernel, rate float64) fluctuation {
	due := make([]float64, len(p.Due))
	for i, at := range p.Due {
		due[i] = at / rate
	}
	edge := min(int(4*k.tau*rate), len(due)/4) // leave out the requests at both ends, which have no load on one side
	all := Stretch{Due: due, Prompt: p.Prompt, Answer: p.Answer, First: edge, Counted: len(due) - 2*edge}.surplus(k, rate)
	least := slices.Min(all)
	f := make(fluctuation, int((slices.Max(all)-least)/binWidth)+1)
	for _, surplus := range all {
		b := &f[int((surplus-least)/binWidth)]
		b.surplus += surplus
		b.share++
	}
	f = slices.DeleteFunc(f, func(b bin) bool { return b.share == 0 })
	for i := range f {
		f[i].surplus /= f[i].share
		f[i].share /= float64(len(all))
	}
	return f
}

// share returns the long-run share of requests that break the limit at a rate, and its gradient. The gradient has the
// derivatives of the share with respect to the coefficients of the fit. The share's derivative with respect to ln rate
// is gradient[0] times the steepness.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (f fit) share(load fluctuation, logRate float64) (share float64, gradient [3]float64) {
	steep, transient := f.steepness(), f.transient()
	for _, bin := range load {
		z, by := f.zWith(observation{logRate: logRate, surplus: bin.surplus}, steep, transient)
		share += bin.share * normal(z)
		d := bin.share * density(z)
		for i := range by {
			gradient[i] += d * by[i]
		}
	}
	return share, gradient
}

// maxDistance is how far a boundary may be from the center of its fit, in ln rate: a factor of 3.
const maxDistance = 1.1

// boundary returns ln of the rate at which the allowed share of requests breaks the limit in the long run. The gradient
// has the derivatives of logRate with respect to the coefficients of the fit. If the boundary is farther than
// maxDistance from the center, ok is false. This happens, for example, if the share hardly grows with the rate.
func (f fit) boundary(p *Population, allowed float64) (logRate float64, gradient [3]float64, ok bool) {
	logRate = f.center
	for range 2 { // the second time with the load at the rate that the first time found
		load := p.fluctuationAt(f.kernel, math.Exp(logRate))
		low, high := f.center-maxDistance, f.center+maxDistance
		if least, _ := f.share(load, low); least > allowed {
			return 0, gradient, false
		}
		if most, _ := f.share(load, high); most < allowed {
			return 0, gradient, false
		}
		var by [3]float64
		for n := 0; n < 50 && high-low > 1e-9; n++ {
			var share float64
			share, by = f.share(load, logRate)
			if share > allowed {
				high = logRate
			} else {
				low = logRate
			}
			if math.Abs(share-allowed) < 1e-7*allowed {
				break
			}
			// Newton's step in ln share, which is straighter than the share, or a bisection if the step leaves the bounds.
			if logRate += share / (by[0] * f.steepness()) * math.Log(allowed/share); !(logRate > low && logRate < high) {
				logRate = (low + high) / 2
			}
		}
		for i := range gradient {
			gradient[i] = -by[i] / (by[0] * f.steepness())
		}
	}
	return logRate, gradient, true
}
