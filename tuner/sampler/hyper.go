package sampler

import (
	"math"
	"math/rand/v2"
	"slices"
)

// A hyperprior holds what is believed of the model's hyperparameters before any trial: independent normal distributions
// of their logarithms. The numbers in a vector of hyperparameters are distances from the medians, in standard
// deviations.
type hyperprior struct {
	dimensions []dimension
	mean       float64   // prior mean of the function
	spread     float64   // spread of the values, ln units
	centres    []float64 // mean of each trend at the measured points
	misfit     float64   // smallest known misfit of the trends, ln units; 0 if none is known
	shared     *sharing  // what the errors of the values have in common; nil if the errors are independent
}

const (
	// A short median length keeps the search from staying where it is. The mean regrets of the six surfaces after 30
	// trials sum to 51 % with a median of 0.3, to 52 % with 0.2, and to 57 % with 0.5 (20 to 30 seeds; the error is
	// about 3 %).
	medianLength, lengthWidth = 0.3, 0.7
	signalWidth               = 0.5  // around the spread of the values
	medianAlike               = 0.7  // correlation of two choices
	meanPart                  = 0.25 // variance of the unknown mean, as a fraction of the squared spread
	// A trend from another machine has the right shape more often than not. If its shape is wrong, its slope may shrink
	// to 0.
	medianSlope, slopeWidth = 0.7, 0.4

	draws, steps = 40, 100 // random draws, and steps of a local search, to find the best vector
	vectors      = 8       // number of vectors of hyperparameters that are drawn from the posterior for the search
	thinning     = 5       // steps of the chain for each vector
)

// size returns the number of hyperparameters: signal, factor of the errors, nugget, for each dimension a length and a
// likeness, and a slope for each trend.
func (h *hyperprior) size() int { return 3 + 2*len(h.dimensions) + len(h.centres) }

// model returns the kernel at a vector, with the data as the model believes them. The errors of capacities are mostly
// shared, because all trials have the same requests. So one factor between 0.1 and 1 makes the errors smaller. Each
// trial also gets an error of its own, the nugget, of about 1 %. The result common has the covariances of the errors, if
// they are not independent.
func (h *hyperprior) model(z []float64, data []datum) (k kernel, believed []datum, common *covariances) {
	d := len(h.dimensions)
	k = kernel{dimensions: h.dimensions, mean: h.mean, inverse: make([]float64, d), alike: make([]float64, d)}
	for i, centre := range h.centres {
		k.slopes = append(k.slopes, max(0, medianSlope+slopeWidth*z[3+2*d+i]))
		k.mean -= k.slopes[i] * centre
	}
	spread := h.unexplained(k, data)
	signal := spread * math.Exp(signalWidth*z[0])
	k.signal, k.constant = signal*signal, meanPart*spread*spread
	factor := min(max(0.5*math.Exp(0.5*z[1]), 0.1), 1)
	nugget := 0.01 * math.Exp(0.7*z[2])
	logit := math.Log(medianAlike / (1 - medianAlike))
	for i := range d {
		k.inverse[i] = math.Exp(-lengthWidth*z[3+2*i]) / medianLength
		k.alike[i] = 1 / (1 + math.Exp(-logit-z[4+2*i]))
	}
	common = h.shared.covariances(factor)
	believed = slices.Clone(data)
	for i := range believed {
		believed[i].variance = squared(factor * believed[i].err)
		if common != nil {
			believed[i].variance = common.at(i, i)
		}
		believed[i].variance += squared(nugget)
	}
	return k, believed, common
}

const (
	// The trends do not explain all of the values. Before any value is measured, the standard deviation of the rest is
	// believed to be priorRest, or more if the trends have a misfit. This belief weighs as much as restTrust values.
	priorRest, restTrust = 0.12, 3
)

// unexplained returns the spread of the part of the values that the trends of a kernel do not explain.
func (h *hyperprior) unexplained(k kernel, data []datum) float64 {
	if len(h.centres) == 0 {
		return h.spread
	}
	sum, n := restTrust*(squared(priorRest)+squared(h.misfit)), float64(restTrust)
	for _, d := range data {
		if d.side == exact {
			sum, n = sum+squared(d.value-k.meanAt(d.row)), n+1
		}
	}
	return math.Sqrt(sum / n)
}

func squared(x float64) float64 { return x * x }

// logPosterior returns the logarithm of the posterior at a vector, up to a constant. For a bound it uses the current
// site.
func (h *hyperprior) logPosterior(z []float64, data []datum) float64 {
	f := h.likelihood(z, data)
	for _, v := range z {
		f -= v * v / 2
	}
	return f
}

func (h *hyperprior) likelihood(z []float64, data []datum) float64 {
	k, believed, common := h.model(z, data)
	if f := condition(k, believed, common).fit; !math.IsNaN(f) {
		return f
	}
	return math.Inf(-1)
}

// sample draws n vectors from the posterior. With the best vector alone, the model would be too sure of itself, and the
// search would stay where it is. Some random draws and a local search find the vector at which the chain begins. The
// chain moves by elliptical slice sampling (Murray, Adams, MacKay 2010), which needs no tuning.
func (h *hyperprior) sample(n int, data []datum, rng *rand.Rand) [][]float64 {
	// The time of an evaluation grows as the cube of the number of data. With many data the posterior is narrow, so
	// fewer evaluations are enough.
	share := min(1, 60/float64(len(data)))
	some := func(n int) int { return max(1, int(math.Round(float64(n)*share))) }
	at := h.climb(data, rng, some(draws), some(steps))
	h.fitBoundsAt(at, data)
	all := [][]float64{at}
	for len(all) < n {
		for range some(thinning) {
			at = h.slice(at, data, rng)
		}
		all = append(all, at)
	}
	return all
}

// fitBoundsAt sets the sites of the bounds (see type datum) so that they fit a vector of hyperparameters. Near this
// vector, the likelihood with fixed sites has the slope of the true likelihood.
func (h *hyperprior) fitBoundsAt(z []float64, data []datum) {
	k, fitted, common := h.model(z, data)
	fitBounds(k, fitted, common, 8)
	for i := range data {
		data[i].site, data[i].siteVariance = fitted[i].site, fitted[i].siteVariance
	}
}

// climb returns the best vector that it finds.
func (h *hyperprior) climb(data []datum, rng *rand.Rand, draws, steps int) []float64 {
	best := make([]float64, h.size())
	h.fitBoundsAt(best, data)
	top := h.logPosterior(best, data)
	radius := 0.5
	for i := range draws + steps {
		z := make([]float64, len(best))
		for j := range z {
			if z[j] = rng.NormFloat64(); i >= draws {
				z[j] = best[j] + radius*z[j]
			}
		}
		f := h.logPosterior(z, data)
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

// slice returns the next vector of the chain. This vector is a point of the likelihood's slice on an ellipse through
// the last vector.
func (h *hyperprior) slice(at []float64, data []datum, rng *rand.Rand) []float64 {
	other := make([]float64, len(at))
	for i := range other {
		other[i] = rng.NormFloat64()
	}
	level := h.likelihood(at, data) + math.Log(1-rng.Float64())
	angle := 2 * math.Pi * rng.Float64()
	low, high := angle-2*math.Pi, angle
	for range 50 { // each turn shrinks the arc towards the last vector
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
