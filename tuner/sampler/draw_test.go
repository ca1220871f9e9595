package sampler

import (
	"math"
	"math/rand/v2"
	"testing"

	"gonum.org/v1/gonum/stat"

	"vllmtuner/realtime"
)

// Functions that are drawn from a process have the mean and the variance of the process. Functions that are drawn from
// a kernel have the kernel's covariance: for numbers, choices, and numbers that may be absent.
func TestDrawnFunctionsAreOfTheProcess(t *testing.T) {
	realtime.Only(t, "draws thousands of functions")
	k := kernel{
		dimensions: []dimension{{numbers: true}, {states: true}, {numbers: true, states: true}, {numbers: true}},
		mean:       0.4, signal: 0.09, constant: 0.01, inverse: []float64{1 / 0.3, 1, 1 / 0.2, 1 / 0.8}, alike: []float64{0.7, 0.6, 0.5, 0.7},
	}
	rng := rand.New(rand.NewPCG(1, 2))
	at := func(x float64, choice int, y float64, z float64) row {
		r := row{{x, aNumber}, {0.5, choice}, {y, aNumber}, {z, aNumber}}
		if y < 0 {
			r[2] = coordinate{0.5, absent}
		}
		return r
	}
	rows := []row{at(0.1, 1, 0.3, 0.2), at(0.3, 1, 0.3, 0.2), at(0.1, 2, 0.3, 0.2), at(0.1, 2, 0.6, 0.9), at(0.9, 3, -1, 0.1), at(0.9, 3, 0.2, 0.1)}
	data := []datum{
		{row: at(0.2, 1, 0.4, 0.5), value: 0.9, variance: 0.001},
		{row: at(0.8, 3, 0.9, 0.2), value: 0.2, variance: 0.01},
		{row: at(0.6, 2, -1, 0.7), value: 0.1, side: below, variance: 0.01, site: 0.05, siteVariance: 0.02},
	}
	p := condition(k, data, nil)
	means, variances := p.predict(rows)
	const n = 4000
	before, after := make([][]float64, len(rows)), make([][]float64, len(rows))
	for range n {
		f := k.draw(3, rng)
		values := p.draw(1, rows, rng)[0]
		for i, r := range rows {
			before[i], after[i] = append(before[i], f.valueAt(r)), append(after[i], values[i])
		}
	}
	for i, a := range rows {
		for j, b := range rows {
			if got, want := stat.Covariance(before[i], before[j], nil), k.covariance(a, b); math.Abs(got-want) > 0.007 {
				t.Errorf("covariance of rows %d and %d = %.4f, want %.4f", i, j, got, want)
			}
		}
		if mean, v := stat.MeanVariance(after[i], nil); math.Abs(mean-means[i]) > 0.02 || math.Abs(v-variances[i]) > 0.1*variances[i]+0.002 {
			t.Errorf("row %d: mean %.4f and variance %.4f, want %.4f and %.4f", i, mean, v, means[i], variances[i])
		}
	}
}
