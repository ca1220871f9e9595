package bench

import (
	"math"
	"math/rand/v2"
	"testing"
)

// StatsOf returns the statistics of latencies in milliseconds. The latencies may be in any order.
func StatsOf(ms []float64) Stats {
	d := distribution{}
	for _, v := range ms {
		d.add(v)
	}
	return d.stats()
}

// The wanted values come from numpy.percentile of numpy 2.
func TestPercentileIsNumpys(t *testing.T) {
	hundred := make([]float64, 100)
	for i := range hundred {
		hundred[i] = float64(i + 1)
	}
	tests := []struct {
		name   string
		values []float64
		p      float64
		want   float64
	}{
		{"the median of an even number lies between the middle two", []float64{1, 2, 3, 4}, 50, 2.5},
		{"p99 of one to a hundred", hundred, 99, 99.01},
		{"p95 of one to a hundred", hundred, 95, 95.05},
		{"p99.9 of one to a hundred", hundred, 99.9, 99.901},
		{"p25 of three", []float64{10, 20, 40}, 25, 15},
		{"p90 of three", []float64{10, 20, 40}, 90, 36},
		{"the only value is every percentile", []float64{7}, 99, 7},
		{"p0 is the least", []float64{1, 5}, 0, 1},
		{"p100 is the greatest", []float64{1, 5}, 100, 5},
		{"of nothing it is zero", nil, 99, 0},
	}
	for _, test := range tests {
		if got := Percentile(test.values, test.p); math.Abs(got-test.want) > 1e-12*test.want {
			t.Errorf("%s: Percentile(p%g) = %v, want %v", test.name, test.p, got, test.want)
		}
	}
}

func TestStatsOfAFewValues(t *testing.T) {
	got := StatsOf([]float64{30, 10, 20})
	want := Stats{N: 3, Mean: 20, Std: math.Sqrt(200.0 / 3), P50: 20, P90: 28, P95: 29, P99: 29.8, P999: 29.980000000000004, Max: 30}
	if got != want {
		t.Errorf("StatsOf(30, 10, 20) = %+v, want %+v", got, want)
	}
	if got := StatsOf(nil); got != (Stats{}) {
		t.Errorf("StatsOf(nil) = %+v, want zero", got)
	}
}

// The mean and the standard deviation are exact even if the spread is tiny compared with the mean.
func TestMomentsAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var whole moments
	var values []float64
	for range 1000 {
		v := 1e9 + random.NormFloat64()
		values = append(values, v)
		whole.add(v)
	}
	var sum, squares float64
	for _, v := range values {
		sum += v - 1e9
	}
	for _, v := range values {
		squares += (v - 1e9 - sum/1000) * (v - 1e9 - sum/1000)
	}
	none := func(float64) float64 { return 0 }
	got := whole.stats(none)
	if got.N != 1000 || math.Abs(got.Mean-1e9-sum/1000) > 1e-6 || math.Abs(got.Std-math.Sqrt(squares/1000)) > 1e-5 {
		t.Errorf("%+v, want a mean of 1e9 + %g and a deviation of %g", got, sum/1000, math.Sqrt(squares/1000))
	}
}
