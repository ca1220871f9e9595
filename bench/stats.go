package bench

import "math"

// Percentile returns the p-th percentile of values in ascending order, with p in [0, 100]. It equals numpy.percentile's
// default (linear interpolation) to the last bit. It is 0 if there are no values.
func Percentile(sorted []float64, p float64) float64 {
	return percentile(len(sorted), p, func(i int) float64 { return sorted[i] })
}

// percentile computes Percentile for n ascending values. The call value(i) returns the i-th of them, counted from 0.
func percentile(n int, p float64, value func(i int) float64) float64 {
	if n == 0 {
		return 0
	}
	at := p / 100 * float64(n-1)
	below := min(max(int(math.Floor(at)), 0), n-1)
	a, b := value(below), value(min(below+1, n-1))
	t := at - float64(below)
	if t >= 0.5 { // numpy interpolates from the nearer end
		return b - (b-a)*(1-t)
	}
	return a + (b-a)*t
}

// moments sums up values without keeping them. It sums squared distances from the mean (Welford's method), because a
// plain sum of squares loses a small spread among large values.
type moments struct {
	n       int
	mean    float64
	squares float64 // sum of (value - mean)²
	max     float64
}

func (m *moments) add(v float64) {
	if m.n == 0 || v > m.max {
		m.max = v
	}
	m.n++
	d := v - m.mean
	m.mean += d / float64(m.n)
	m.squares += d * (v - m.mean)
}

// stats returns the statistics of the values. The given function must return the percentile p of the values.
func (m *moments) stats(percentile func(p float64) float64) Stats {
	if m.n == 0 {
		return Stats{}
	}
	return Stats{
		N: m.n, Mean: m.mean, Std: math.Sqrt(m.squares / float64(m.n)),
		P50: percentile(50), P90: percentile(90), P95: percentile(95), P99: percentile(99), P999: percentile(99.9), Max: m.max,
	}
}
