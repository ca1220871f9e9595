package bench

import (
	"slices"

	"github.com/DataDog/sketches-go/ddsketch/mapping"
	"github.com/DataDog/sketches-go/ddsketch/store"
	"github.com/samber/lo"
)

// sketchAccuracy is how far a percentile of a sketch may be from the value itself, as a share of it. Limits are judged on
// exact counts, so 0.5 % is for reading; it costs 8 bytes per 1 % step of latency that occurs, 35 KB from 1 ns to 300 years.
const sketchAccuracy = 0.005

// A distribution is one latency of many requests in milliseconds: the values themselves, or a sketch of them.
type distribution struct {
	moments
	values []float64
	sketch *sketch // nil when values are kept
}

// add adds one value.
func (d *distribution) add(ms float64) {
	d.moments.add(ms)
	if d.sketch != nil {
		d.sketch.add(ms)
		return
	}
	d.values = append(d.values, ms)
}

// merge adds the values of another distribution of the same kind.
func (d *distribution) merge(o *distribution) {
	d.moments.merge(o.moments)
	if d.sketch != nil {
		d.sketch.merge(o.sketch)
		return
	}
	d.values = append(d.values, o.values...)
}

// stats returns the figures; values are sorted in place.
func (d *distribution) stats() Stats {
	if d.sketch == nil {
		slices.Sort(d.values)
		return d.moments.stats(func(p float64) float64 { return Percentile(d.values, p) })
	}
	return d.moments.stats(func(p float64) float64 { return min(d.sketch.percentile(p), d.max) })
}

// A sketch keeps how many values fell into each of many narrow classes whose borders grow by a constant factor (DDSketch,
// Masson, Rim and Lee, VLDB 2019). It needs the same memory for a thousand and a billion values, and two sketches add up.
type sketch struct {
	classes *store.DenseStore
	zeros   int // values of zero, which have no logarithm; negative ones, which only a clock that was set back could give, too
}

// latencyClasses are the classes of all sketches. They are refused for an accuracy outside of (0, 1) alone.
var latencyClasses = lo.Must(mapping.NewLogarithmicMapping(sketchAccuracy))

func newSketch() *sketch { return &sketch{classes: store.NewDenseStore()} }

func (s *sketch) add(v float64) {
	if v < latencyClasses.MinIndexableValue() {
		s.zeros++
		return
	}
	s.classes.Add(latencyClasses.Index(v))
}

func (s *sketch) merge(o *sketch) {
	s.zeros += o.zeros
	s.classes.MergeWith(o.classes)
}

// percentile returns numpy's linear percentile, with each value replaced by the middle of its class.
func (s *sketch) percentile(p float64) float64 {
	return percentile(s.zeros+int(s.classes.TotalCount()), p, func(i int) float64 {
		if i < s.zeros {
			return 0
		}
		return latencyClasses.Value(s.classes.KeyAtRank(float64(i - s.zeros)))
	})
}

// A Sketch is how the values of a latency are spread, to draw it or to add up several. Count i is of the values in milliseconds from γ^(First+i) to
// γ^(First+i+1), γ = 1.005 / 0.995.
type Sketch struct {
	Zeros  int   `json:"zeros,omitempty"` // values of zero
	First  int   `json:"first"`
	Counts []int `json:"counts"`
}

// Sketches are the latencies of a run of which there are any.
type Sketches struct {
	TTFT *Sketch `json:"ttft_ms,omitempty"`
	TPOT *Sketch `json:"tpot_ms,omitempty"`
	ITL  *Sketch `json:"itl_ms,omitempty"`
	E2E  *Sketch `json:"e2e_ms,omitempty"`
}

// spread returns the distribution as a Sketch; nil of one without values.
func (d *distribution) spread() *Sketch {
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
	all.classes.ForEach(func(class int, count float64) bool {
		if len(out.Counts) == 0 {
			out.First = class
		}
		for len(out.Counts) < class-out.First {
			out.Counts = append(out.Counts, 0)
		}
		out.Counts = append(out.Counts, int(count))
		return false
	})
	return out
}
