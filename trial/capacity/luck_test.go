package capacity

import (
	"math"
	"math/rand/v2"
	"testing"
)

// The highest of several equal capacities reads too high. After the correction, less than a third of that error is left,
// whatever the truths are; and a capacity that is far above the others is not changed.
func TestLuckOfTheChosen(t *testing.T) {
	for _, row := range []struct {
		name    string
		truths  []float64 // ln rate
		atLeast float64   // mean error of the chosen capacity before the correction
	}{
		{"two equals", []float64{0, 0}, 0.02},
		{"three equals", []float64{0, 0, 0}, 0.03},
		{"one is a standard error better", []float64{0, -0.04}, 0.005},
		{"one is far better", []float64{0, -0.3}, 0},
	} {
		rng := rand.New(rand.NewPCG(1, 3))
		const rounds, stdErr = 4000, 0.04
		before, after := 0.0, 0.0
		for range rounds {
			var all []Capacity
			best := 0
			for i, truth := range row.truths {
				all = append(all, Capacity{Rate: math.Exp(truth + stdErr*rng.NormFloat64()), StdErr: stdErr, Bound: Exact})
				if all[i].Rate > all[best].Rate {
					best = i
				}
			}
			others := append(append([]Capacity{}, all[:best]...), all[best+1:]...)
			off := math.Log(all[best].Rate) - row.truths[best]
			before += off / rounds
			after += (off - all[best].Luck(others)) / rounds
		}
		t.Logf("%s: before %.4f, after %.4f", row.name, before, after)
		if before < row.atLeast || math.Abs(after) > max(0.002, before/3) {
			t.Errorf("%s: the mean error is %.4f before the correction and %.4f after it", row.name, before, after)
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
	if want := 2 * math.Exp(-0.05); math.Abs(c.Rate-want) > 1e-9 || c.Lowest > 0.9*2 || math.Abs(c.Highest-want*math.Exp(1.96*0.04)) > 1e-3 {
		t.Errorf("lowered: %+v", c)
	}
	if lowered := bound.Lowered(0.05); lowered.Rate != bound.Rate {
		t.Errorf("a bound was lowered to %g", lowered.Rate)
	}
}
