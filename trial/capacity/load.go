package capacity

import "math"

// A Stretch is the load that one probe offered: when each request was due and how much work it brought. No server is
// needed to know it. It contains the uncounted requests too, because counted requests wait behind them.
type Stretch struct {
	Due    []float64 // seconds since the probe began, ascending
	Prompt []float64 // size of each prompt, relative to the mean of the workload
	Answer []float64 // size of each answer, relative to the mean

	First, Counted int // the counted requests are Due[First : First+Counted]
}

// A kernel says how much other requests matter to a request. A time to first token depends on the work before the
// request. A time per token also depends on the work that comes while the answer is generated.
type kernel struct {
	tau    float64 // seconds over which the weight of other work falls to 1/e
	around bool    // later work counts as much as earlier work
	prompt float64 // weight of the prompts in the work; the answers have the rest
}

// kernels returns the kernels that a fit tries; the fit keeps the best. The shortest is a few steps of an
// engine. The longest is a third of an ordinary lead-in: with a longer one every window would begin with less than the
// mean load.
func kernels() (all []kernel) {
	for tau := 0.625; tau <= 20; tau *= 2 {
		all = append(all, kernel{tau, false, 0.5}, kernel{tau, true, 0.5})
	}
	return all
}

// mixes are variants of the best kernel, in which only prompts count, or only answers.
func (k kernel) mixes() []kernel {
	return []kernel{{k.tau, k.around, 0}, {k.tau, k.around, 1}}
}

// idle is added to each load, as a part of the rate, because the logarithm of no load would be infinite.
const idle = 0.02

// surplus returns, for each counted request, ln of the load around it divided by the rate of the probe. It is 0 where
// the other requests brought as much work as evenly spread requests of mean size. A request's own work is left out.
// Before the stretch there was no load: a probe begins on an idle server. After it the mean load is assumed.
func (s Stretch) surplus(k kernel, rate float64) []float64 {
	if s.Counted == 0 {
		return nil
	}
	around, work := make([]float64, len(s.Due)), make([]float64, len(s.Due))
	for i := range work {
		work[i] = k.prompt*s.Prompt[i] + (1-k.prompt)*s.Answer[i]
	}
	mean := rate * k.tau // mean of the sum of decayed work on one side
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
