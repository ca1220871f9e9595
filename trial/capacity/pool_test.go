package capacity

import (
	"math"
	"math/rand/v2"
	"testing"
)

func exactly(rate, stdErr float64) Capacity {
	return Capacity{Rate: rate, Low: 0.9 * rate, High: 1.1 * rate, Bound: Exact, StdErr: stdErr, InFlight: 10 * rate}
}

func TestPooled(t *testing.T) {
	a, b := exactly(2, 0.02), exactly(2.04, 0.04)
	a.Pieces, b.Pieces = []Piece{{Draw: 1, Moved: 0.01}}, []Piece{{Draw: 2, Moved: 0.02}}
	b.Doubt = "a pass above a fail"
	got, ok := a.Pooled([]Capacity{a, b})
	const share = 0.8 // of the first in the mean
	want, wantErr := math.Exp(share*math.Log(2)+(1-share)*math.Log(2.04)), 0.02*math.Sqrt(share)
	if !ok || math.Abs(got.Rate-want) > 1e-9 || math.Abs(got.StdErr-wantErr) > 1e-9 {
		t.Errorf("Pooled = %.5g ± %.4f, %v, want %.5g ± %.4f", got.Rate, got.StdErr, ok, want, wantErr)
	}
	// In the interval is also the error of the model, which is half of the smaller error.
	if high := want * math.Exp(1.96*math.Hypot(wantErr, 0.01)); math.Abs(got.Highest-high) > 1e-4 {
		t.Errorf("the interval ends at %.5g, want %.5g", got.Highest, high)
	}
	if got.Low != a.Low || got.High != a.High || got.Doubt != b.Doubt || math.Abs(got.InFlight-(share*20+(1-share)*20.4)) > 1e-9 {
		t.Errorf("Pooled = %+v: want the bracket of the first, the doubt of either, and the mean of the requests in flight", got)
	}
	if len(got.Pieces) != 2 || math.Abs(got.Pieces[0].Moved-share*0.01) > 1e-12 || math.Abs(got.Pieces[1].Moved-(1-share)*0.02) > 1e-12 {
		t.Errorf("the pieces are %+v, want each with its share of the mean", got.Pieces)
	}
	if again, _ := b.Pooled([]Capacity{a, b}); again.Rate != got.Rate || again.StdErr != got.StdErr || again.Low != b.Low {
		t.Errorf("of the second capacity Pooled = %+v, want the same rate and its own bracket", again)
	}
	if far, _ := a.Pooled([]Capacity{a, exactly(2.5, 0.02)}); far.StdErr < 0.1 {
		t.Errorf("two capacities that differ by 25 %% have the mean %.4g ± %.4f, want an error of their difference's size", far.Rate, far.StdErr)
	}
	alone, ok := a.Pooled([]Capacity{a})
	if !ok || math.Abs(alone.Rate-a.Rate) > 1e-12 || math.Abs(alone.StdErr-a.StdErr) > 1e-12 {
		t.Errorf("one capacity alone gives %.6g ± %.4f, %v, want itself", alone.Rate, alone.StdErr, ok)
	}
	atLeast := a
	atLeast.Bound = AtLeast
	for _, other := range []Capacity{atLeast, exactly(2, 0)} {
		if got, ok := a.Pooled([]Capacity{a, other}); ok || got.Rate != a.Rate {
			t.Errorf("with %+v Pooled = %+v, %v, want the first alone", other, got, ok)
		}
	}
}

// The interval of pooled capacities holds the truth in at least 95 of 100 cases.
func TestPooledIntervalsHold(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	const n = 4000
	for _, times := range []int{2, 4} {
		held := 0
		for range n {
			var all []Capacity
			ofModel := modelError * rng.NormFloat64()
			for range times {
				stdErr := 0.03 + 0.02*rng.Float64()
				own := math.Sqrt(stdErr*stdErr - modelError*modelError)
				all = append(all, exactly(3*math.Exp(ofModel+own*rng.NormFloat64()), stdErr))
			}
			if c, _ := all[0].Pooled(all); c.Lowest <= 3 && 3 <= c.Highest {
				held++
			}
		}
		if part := float64(held) / n; part < 0.95 || part > 0.99 {
			t.Errorf("the interval of %d capacities holds the truth in %.1f %%, want 95 to 99", times, 100*part)
		}
	}
}
