package bench

import (
	"slices"

	"github.com/DataDog/sketches-go/ddsketch/mapping"
	"github.com/DataDog/sketches-go/ddsketch/store"
	"github.com/samber/lo"
)

// sketchAccuracy is the largest relative error of a sketch's percentile. Verdicts use exact counts, so 0.5 % is good
// enough for people who read the percentiles. A sketch takes 8 bytes for each 1 % step of latency: 35 KB from 1 ns to
// 300 years.
const sketchAccuracy = 0.005

// A distribution holds the values of one latency for many requests, in milliseconds. It keeps either all values or a
// sketch of them.
type distribution struct {
	moments
	values []float64
	sketch *sketch // nil if all values are kept
}

// add adds one value in milliseconds.
func (d *distribution) add(ms float64) {
	d.moments.add(ms)
	if d.sketch != nil {
		d.sketch.add(ms)
		return
	}
	d.values = append(d.values, ms)
}

// stats returns the statistics. It sorts d.values.
func (d *distribution) stats() Stats {
	if d.sketch == nil {
		slices.Sort(d.values)
		return d.moments.stats(func(p float64) float64 { return Percentile(d.values, p) })
	}
	return d.moments.stats(func(p float64) float64 { return min(d.sketch.percentile(p), d.max) })
}

// A sketch counts values in narrow buckets whose bounds grow by a constant factor (DDSketch; Masson, Rim and Lee, VLDB
// 2019). Its memory does not depend on the number of values.
type sketch struct {
	buckets *store.DenseStore
	zeros   int // number of values up to zero: zero has no logarithm, and a value is negative only if the clock was set back
}

// latencyBuckets are the buckets of all sketches. The constructor fails only for an accuracy outside (0, 1), so lo.Must
// never panics here.
var latencyBuckets = lo.Must(mapping.NewLogarithmicMapping(sketchAccuracy))

func newSketch() *sketch { return &sketch{buckets: store.NewDenseStore()} }

func (s *sketch) add(v float64) {
	if v < latencyBuckets.MinIndexableValue() {
		s.zeros++
		return
	}
	s.buckets.Add(latencyBuckets.Index(v))
}

// percentile interpolates linearly, as numpy does. It replaces each value by the middle of the value's bucket.
func (s *sketch) percentile(p float64) float64 {
	return percentile(s.zeros+int(s.buckets.TotalCount()), p, func(i int) float64 {
		if i < s.zeros {
			return 0
		}
		return latencyBuckets.Value(s.buckets.KeyAtRank(float64(i - s.zeros)))
	})
}

// A Sketch is a histogram of a latency, to be drawn in a chart or added to other histograms. Counts[i] is the number of
// values from γ^(First+i) to γ^(First+i+1) milliseconds, with γ = 1.005 / 0.995.
type Sketch struct {
	Zeros  int   `json:"zeros,omitempty"` // values of zero
	First  int   `json:"first"`
	Counts []int `json:"counts"`
}

// Sketches are the histograms of a run's latencies. A latency without values has no histogram.
type Sketches struct {
	TTFT *Sketch `json:"ttft_ms,omitempty"`
	TPOT *Sketch `json:"tpot_ms,omitempty"`
	ITL  *Sketch `json:"itl_ms,omitempty"`
	E2E  *Sketch `json:"e2e_ms,omitempty"`
}

// histogram returns the distribution as a Sketch, or nil if the distribution has no values.
func (d *distribution) histogram() *Sketch {
	if d.n == 0 {
		return nil
	}
	all := d.sketch
	if all == nil {
		all = newSketch()
		for _, v := range d.values {
			all.add(v)
		}
	}
	out := &Sketch{Zeros: all.zeros, Counts: []int{}}
	all.buckets.ForEach(func(bucket int, count float64) bool {
		if len(out.Counts) == 0 {
			out.First = bucket
		}
		for len(out.Counts) < bucket-out.First {
			out.Counts = append(out.Counts, 0)
		}
		out.Counts = append(out.Counts, int(count))
		return false
	})
	return out
}
