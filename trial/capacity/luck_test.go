package capacity

import (
	"math"
	"math/rand/v2"
	"testing"
)

// The highest of several equal capacities reads too high. After the correction less than half of that error is left, and
// nothing reads too low by more than half a per cent: not when the best is far ahead, and not when the errors differ.
func TestLuckOfTheChosen(t *testing.T) {
	for _, row := range []struct {
		name    string
		truths  []float64 // ln rate
		errs    []float64 // standard errors
		atLeast float64   // mean error of the chosen capacity before the correction
	}{
		{"two equals", []float64{0, 0}, []float64{0.04, 0.04}, 0.02},
		{"three equals", []float64{0, 0, 0}, []float64{0.04, 0.04, 0.04}, 0.03},
		{"one is a standard error better", []float64{0, -0.04}, []float64{0.04, 0.04}, 0.005},
		{"one is far better", []float64{0, -0.3}, []float64{0.04, 0.04}, 0},
		{"two equals, and a rough one far below", []float64{0, 0, -0.7}, []float64{0.04, 0.04, 0.15}, 0.02},
		{"two equals, one rough", []float64{0, 0}, []float64{0.02, 0.05}, 0.015},
	} {
		rng := rand.New(rand.NewPCG(1, 3))
		const rounds = 4000
		before, after := 0.0, 0.0
		byChosen, times := make([]float64, len(row.truths)), make([]float64, len(row.truths))
		for range rounds {
			var all []Capacity
			best := 0
			for i, truth := range row.truths {
				all = append(all, Capacity{Rate: math.Exp(truth + row.errs[i]*rng.NormFloat64()), StdErr: row.errs[i], Bound: Exact})
				if all[i].Rate > all[best].Rate {
					best = i
				}
			}
			others := append(append([]Capacity{}, all[:best]...), all[best+1:]...)
			off := math.Log(all[best].Rate) - row.truths[best]
			left := off - all[best].Luck(others)
			before, after = before+off/rounds, after+left/rounds
			byChosen[best], times[best] = byChosen[best]+left, times[best]+1
		}
		t.Logf("%s: before %.4f, after %.4f", row.name, before, after)
		if before < row.atLeast || after > max(0.002, before/2) || after < -0.005 {
			t.Errorf("%s: the mean error is %.4f before the correction and %.4f after it", row.name, before, after)
		}
		for i, n := range times {
			if n > rounds/10 && byChosen[i]/n < -0.005 {
				t.Errorf("%s: if capacity %d is chosen, the mean error is %.4f after the correction", row.name, i, byChosen[i]/n)
			}
		}
	}
}

func TestLuckNeedsComparableCapacities(t *testing.T) {
	of := func(rate, stdErr float64) Capacity {
		return Capacity{Rate: rate, StdErr: stdErr, Bound: Exact, Lowest: rate * 0.9, Highest: rate * 1.1}
	}
	bound := Capacity{Rate: 2, Bound: AtMost, High: 2}
	if luck := of(2, 0.04).Luck([]Capacity{bound, of(2, 0)}); luck != 0 {
		t.Errorf("the luck among bounds is %g, want 0", luck)
	}
	if luck := of(2, 0.04).Luck(nil); luck != 0 {
		t.Errorf("the luck of the only capacity is %g, want 0", luck)
	}
	c := of(2, 0.04).Lowered(0.05)
	if want := 2 * math.Exp(-0.05); math.Abs(c.Rate-want) > 1e-9 || c.Lowest > 0.9*2 || math.Abs(c.Highest-1.1*want) > 1e-9 {
		t.Errorf("lowered: %+v", c)
	}
	if lowered := bound.Lowered(0.05); lowered.Rate != bound.Rate {
		t.Errorf("a bound was lowered to %g", lowered.Rate)
	}
	if wide := of(2, 0.01); wide.Lowered(0).Highest != wide.Highest || wide.Lowered(0).Lowest != wide.Lowest {
		t.Errorf("without luck the interval became %+v", wide.Lowered(0))
	}
}
