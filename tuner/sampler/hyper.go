package sampler

import (
	"math"
	"math/rand/v2"
	"slices"
)

// A hyperprior holds what is believed of the model's hyperparameters before any trial: independent normal distributions
// of their logarithms. A vector of hyperparameters is in standard deviations from the medians.
type hyperprior struct {
	dimensions []dimension
	mean       float64 // of the function
	spread     float64 // of the values, ln units
}

const (
	// A short median keeps the search from staying where it is. The mean regrets of the six surfaces after 30 trials sum
	// to 51 % with 0.3, to 52 % with 0.2, and to 57 % with 0.5 (20 to 30 seeds; the error is about 3 %).
	medianLength, lengthWidth = 0.3, 0.7
	signalWidth               = 0.5  // around the spread of the values
	medianAlike               = 0.7  // correlation of two choices
	meanPart                  = 0.25 // variance of the unknown mean, as a part of the spread's

	draws, steps = 40, 100 // to find the best vector
	vectors      = 8       // drawn from the posterior
	thinning     = 5       // steps of the chain for each
)

// size returns the number of hyperparameters: signal, factor of the errors, nugget, and for each dimension a length and
// a likeness.
func (h *hyperprior) size() int { return 3 + 2*len(h.dimensions) }

// model returns the kernel at a vector, with the data as the model believes them. The errors of capacities are mostly
// shared, because all trials have the same requests. So one factor between 0.1 and 1 scales them, and a nugget, about
// 1 %, is added.
func (h *hyperprior) model(z []float64, data []datum) (kernel, []datum) {
	d := len(h.dimensions)
	k := kernel{dimensions: h.dimensions, inverse: make([]float64, d), alike: make([]float64, d)}
	signal := h.spread * math.Exp(signalWidth*z[0])
	k.signal, k.constant = signal*signal, meanPart*h.spread*h.spread
	factor := min(max(0.5*math.Exp(0.5*z[1]), 0.1), 1)
	nugget := 0.01 * math.Exp(0.7*z[2])
	logit := math.Log(medianAlike / (1 - medianAlike))
	for i := range d {
		k.inverse[i] = math.Exp(-lengthWidth*z[3+2*i]) / medianLength
		k.alike[i] = 1 / (1 + math.Exp(-logit-z[4+2*i]))
	}
	data = slices.Clone(data)
	for i := range data {
		data[i].variance = squared(factor*data[i].err) + squared(nugget)
	}
	return k, data
}

func squared(x float64) float64 { return x * x }

// fit returns the logarithm of the posterior at a vector, up to a constant. Bounds count with the sites that they have.
func (h *hyperprior) fit(z []float64, data []datum) float64 {
	f := h.likelihood(z, data)
	for _, v := range z {
		f -= v * v / 2
	}
	return f
}

func (h *hyperprior) likelihood(z []float64, data []datum) float64 {
	k, believed := h.model(z, data)
	if f := condition(k, h.mean, believed).fit; !math.IsNaN(f) {
		return f
	}
	return math.Inf(-1)
}

// sample draws vectors from the posterior. A single best vector would be too sure of itself: the search stays where it
// is. The chain begins at the best vector that some random draws and a local search find. It moves by elliptical slice
// sampling (Murray, Adams, MacKay 2010), which needs no tuning.
func (h *hyperprior) sample(data []datum, rng *rand.Rand) [][]float64 {
	// An evaluation costs n³, and many data leave little room around the best vector.
	share := min(1, 60/float64(len(data)))
	some := func(n int) int { return max(1, int(math.Round(float64(n)*share))) }
	at := h.climb(data, rng, some(draws), some(steps))
	h.settleAt(at, data)
	all := [][]float64{at}
	for len(all) < vectors {
		for range some(thinning) {
			at = h.slice(at, data, rng)
		}
		all = append(all, at)
	}
	return all
}

// settleAt gives the bounds the sites that fit the vector. Near it, the likelihood with fixed sites has the slope of the
// true one.
func (h *hyperprior) settleAt(z []float64, data []datum) {
	k, settled := h.model(z, data)
	settle(k, h.mean, settled, 8)
	for i := range data {
		data[i].site, data[i].siteVariance = settled[i].site, settled[i].siteVariance
	}
}

// climb returns the best vector that it finds.
func (h *hyperprior) climb(data []datum, rng *rand.Rand, draws, steps int) []float64 {
	best := make([]float64, h.size())
	h.settleAt(best, data)
	top := h.fit(best, data)
	radius := 0.5
	for i := range draws + steps {
		z := make([]float64, len(best))
		for j := range z {
			if z[j] = rng.NormFloat64(); i >= draws {
				z[j] = best[j] + radius*z[j]
			}
		}
		f := h.fit(z, data)
		switch {
		case f > top:
			best, top = z, f
			radius = min(1, radius*1.5)
		case i >= draws:
			radius = max(0.02, radius*0.93)
		}
	}
	return best
}

// slice returns the next vector of the chain: a point of the likelihood's slice on an ellipse through the last one.
func (h *hyperprior) slice(at []float64, data []datum, rng *rand.Rand) []float64 {
	other := make([]float64, len(at))
	for i := range other {
		other[i] = rng.NormFloat64()
	}
	level := h.likelihood(at, data) + math.Log(1-rng.Float64())
	angle := 2 * math.Pi * rng.Float64()
	low, high := angle-2*math.Pi, angle
	for range 50 { // each turn shrinks the arc towards at
		z := make([]float64, len(at))
		for i := range z {
			z[i] = at[i]*math.Cos(angle) + other[i]*math.Sin(angle)
		}
		if h.likelihood(z, data) > level {
			return z
		}
		if angle < 0 {
			low = angle
		} else {
			high = angle
		}
		angle = low + (high-low)*rng.Float64()
	}
	return at
}
