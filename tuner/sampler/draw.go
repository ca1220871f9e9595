package sampler

import (
	"math"
	"math/rand/v2"

	"gonum.org/v1/gonum/floats"
)

// waves is the number of cosines whose sum is a function drawn from the kernel. The covariance of the drawn functions
// differs from the kernel by about 1/√waves of the variance.
const waves = 160

// A drawn is a function drawn from a kernel before the data.
type drawn struct {
	kernel *kernel
	offset float64
	waves  []wave
}

// A wave is one cosine. Its argument depends on the numbers by a frequency, and on the states by a phase.
type wave struct {
	height, phase float64
	frequencies   []float64   // one for each dimension
	phases        [][]float64 // for each dimension with states: a phase for each state, from lowestState on; nil where all states are alike
}

// lowestState is the smallest state of a coordinate.
const lowestState = off

// draw draws n functions from the process, and returns their values at the rows. It draws each function from the kernel
// and moves it so that it fits the data (Matheron's rule; Wilson and others 2020).
func (p *process) draw(n int, rows []row, rng *rand.Rand) (all [][]float64) {
	states := p.largestState(rows)
	cross := make([][]float64, len(rows)) // covariances of each row and the data
	for j, r := range rows {
		cross[j] = make([]float64, len(p.data))
		for i := range p.data {
			cross[j][i] = p.kernel.covariance(p.data[i].row, r)
		}
	}
	for range n {
		f := p.kernel.draw(states, rng)
		weight := p.weightOf(f, rng)
		values := make([]float64, len(rows))
		for j, r := range rows {
			values[j] = f.valueAt(r) + floats.Dot(cross[j], weight)
		}
		all = append(all, values)
	}
	return all
}

// weightOf returns the weights that make a drawn function fit the data. The weights belong to the function's
// covariances with the data.
func (p *process) weightOf(f *drawn, rng *rand.Rand) []float64 {
	residual := make([]float64, len(p.data))
	for i, d := range p.data {
		value, variance := d.value, d.variance
		if d.side != exact {
			value, variance = d.site, d.siteVariance
		}
		residual[i] = value - f.valueAt(d.row) - math.Sqrt(variance)*rng.NormFloat64()
	}
	return p.solve(residual)
}

func (p *process) largestState(rows []row) int {
	largest := aNumber
	for _, r := range rows {
		for i := range p.kernel.dimensions {
			largest = max(largest, r[i].state)
		}
	}
	for _, d := range p.data {
		for i := range p.kernel.dimensions {
			largest = max(largest, d.row[i].state)
		}
	}
	return largest
}

// draw draws a function by random Fourier features. The spectrum of a Matérn kernel of order 5/2 is Student's t
// distribution with five degrees of freedom. The factor of the kernel for a dimension with states is a mixture. With
// the probability in the field alike, a wave ignores the dimension. Otherwise each state has a phase of its own.
//
// The kernel of the capacity has no linear part.
func (k *kernel) draw(largestState int, rng *rand.Rand) *drawn {
	f := &drawn{kernel: k, offset: math.Sqrt(k.constant) * rng.NormFloat64(), waves: make([]wave, waves)}
	height := math.Sqrt(2 * k.signal / waves)
	for i := range f.waves {
		w := wave{height: height * rng.NormFloat64(), phase: 2 * math.Pi * rng.Float64()}
		w.frequencies, w.phases = make([]float64, len(k.dimensions)), make([][]float64, len(k.dimensions))
		scale := tail(rng)
		for j := range k.dimensions {
			switch d := &k.dimensions[j]; {
			case !d.states:
				w.frequencies[j] = scale * k.inverse[j] * rng.NormFloat64()
			case rng.Float64() >= k.alike[j]:
				w.frequencies[j] = tail(rng) * k.inverse[j] * rng.NormFloat64()
				w.phases[j] = make([]float64, largestState-lowestState+1)
				for s := range w.phases[j] {
					w.phases[j][s] = 2 * math.Pi * rng.Float64()
				}
			}
		}
		f.waves[i] = w
	}
	return f
}

// tail returns a random factor. A normal random number times this factor has Student's t distribution with five degrees
// of freedom.
func tail(rng *rand.Rand) float64 {
	const freedom = 5
	square := 0.0
	for range freedom {
		square += squared(rng.NormFloat64())
	}
	return math.Sqrt(freedom / square)
}

// valueAt returns the value of the drawn function at a row.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (f *drawn) valueAt(r row) float64 {
	sum := f.kernel.meanAt(r) + f.offset
	for i := range f.waves {
		w := &f.waves[i]
		argument := w.phase
		for j, frequency := range w.frequencies {
			argument += frequency * r[j].at
			if w.phases[j] != nil {
				argument += w.phases[j][r[j].state-lowestState]
			}
		}
		sum += w.height * math.Cos(argument)
	}
	return sum
}
