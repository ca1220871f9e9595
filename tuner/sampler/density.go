package sampler

import (
	"math"
	"math/rand/v2"
	"slices"

	parzen "github.com/c-bata/goptuna/tpe"
	"gonum.org/v1/gonum/stat/distuv"

	"vllmtuner/tuner/space"
)

// A density is the estimated distribution of one parameter in some trials, over the unit interval. For a number, the
// parts of the density are goptuna's Parzen kernels, cut off at the ends of the interval. For a parameter with choices,
// each choice is a part.
type density struct {
	weights []float64       // weights of the parts; their sum is 1
	kernels []distuv.Normal // parts of a number; nil for choices
}

// Each choice begins with the weight of choicePrior trials. With a weight of 1, as in goptuna, a study tends to stay
// with the first choice that was good. Then the median regret on the mixed surface at 8 % noise is 14.9 % instead of
// 10.6 % (200 seeds, measured as in type tpe).
const choicePrior = 2

// newDensity returns the density of the i-th parameter in the trials in which the parameter has a value. For a number,
// a kernel over the whole range has the weight of one trial.
func newDensity(p *space.Parameter, i int, trials []observation) density {
	var values []float64
	for _, o := range trials {
		if o.active[i] {
			values = append(values, o.unit[i])
		}
	}
	if n := choices(p); n > 0 {
		d := density{weights: make([]float64, n)}
		share := 1 / (float64(len(values)) + choicePrior*float64(n))
		for k := range d.weights {
			d.weights[k] = choicePrior * share
		}
		for _, u := range values {
			d.weights[d.choice(u)] += share
		}
		return d
	}
	// Goptuna permutes its kernels once too often. With sorted values this has no effect.
	slices.Sort(values)
	e := parzen.NewParzenEstimator(values, 0, 1, parzen.ParzenEstimatorParams{
		ConsiderPrior: true, PriorWeight: 1, ConsiderMagicClip: true, Weights: equal,
	})
	d := density{weights: e.Weights}
	for k := range e.Mus {
		d.kernels = append(d.kernels, distuv.Normal{Mu: e.Mus[k], Sigma: e.Sigmas[k]})
	}
	return d
}

// equal gives all trials the same weight. The server does not change with time, so an old trial is as valid as a new
// one.
func equal(n int) []float64 { return slices.Repeat([]float64{1}, n) }

// draw returns a random value with this density.
func (d density) draw(rng *rand.Rand) float64 {
	part, r := 0, rng.Float64()
	for part < len(d.weights)-1 && r >= d.weights[part] {
		r -= d.weights[part]
		part++
	}
	if d.kernels == nil {
		return (float64(part) + 0.5) / float64(len(d.weights))
	}
	k := d.kernels[part]
	low, high := k.CDF(0), k.CDF(1)
	return min(max(k.Quantile(low+rng.Float64()*(high-low)), 0), 1)
}

// log returns the logarithm of the density at u, except for a constant term.
func (d density) log(u float64) float64 {
	if d.kernels == nil {
		return math.Log(d.weights[d.choice(u)])
	}
	sum := 0.0
	for i, k := range d.kernels {
		sum += d.weights[i] * k.Prob(u) / (k.CDF(1) - k.CDF(0))
	}
	return math.Log(sum)
}

// choice returns the index of the choice that u stands for.
func (d density) choice(u float64) int {
	n := len(d.weights)
	return min(n-1, int(u*float64(n)))
}

// choices returns the number of choices of a parameter; 0 for a number.
func choices(p *space.Parameter) int {
	switch p.Kind {
	case space.Float, space.Int:
		return 0
	}
	return len(p.Levels(1))
}
