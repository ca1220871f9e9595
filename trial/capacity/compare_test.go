package capacity

import (
	"math"
	"math/rand/v2"
	"testing"
)

func TestCompare(t *testing.T) {
	of := func(rate, stdErr float64) Capacity { return Capacity{Rate: rate, StdErr: stdErr, Bound: Exact} }
	bound := of(2, 0.1)
	bound.Bound = AtLeast
	for _, row := range []struct {
		name            string
		a, b            Capacity
		ok              bool
		lowest, highest float64
		better          float64
		distinguishable bool
	}{
		{"of two equals, each is as likely the better one", of(2, 0.1), of(2, 0.1), true, 0.758, 1.319, 0.5, false},
		{"a fifth more, each known to 3 %: sure", of(2.4, 0.03), of(2, 0.03), true, 1.104, 1.304, 1, true},
		{"a fifth more, each known to 10 %: not sure", of(2.4, 0.1), of(2, 0.1), true, 0.909, 1.583, 0.901, false},
		{"two standard errors of the difference are enough", of(math.Exp(0.1), 0.03), of(1, 0.04), true, 1.002, 1.219, 0.977, true},
		{"the worse one is not better", of(2, 0.03), of(2.4, 0.03), true, 0.767, 0.906, 0, false},
		{"a lower bound cannot be compared", bound, of(1, 0.1), false, 0, 0, 0, false},
		{"no capacity can be compared with a lower bound", of(1, 0.1), bound, false, 0, 0, 0, false},
		{"an unknown error says nothing", of(3, 0), of(1, 0.1), false, 0, 0, 0, false},
	} {
		c, ok := Compare(row.a, row.b)
		if ok != row.ok || math.Abs(c.Lowest-row.lowest) > 1e-3 || math.Abs(c.Highest-row.highest) > 1e-3 || math.Abs(c.Better-row.better) > 1e-3 ||
			c.Distinguishable() != row.distinguishable {
			t.Errorf("%s: %+v, %t, distinguishable %t; want %g to %g, P %g, %t", row.name, c, ok, c.Distinguishable(), row.lowest, row.highest, row.better, row.distinguishable)
		}
		if ok && math.Abs(c.Ratio-row.a.Rate/row.b.Rate) > 1e-9 {
			t.Errorf("%s: ratio %g", row.name, c.Ratio)
		}
	}
}

// If the standard errors are correct, the interval holds the true ratio in 95 of 100 comparisons. Of 100 comparisons of
// equal capacities, 2.5 call the first one better.
func TestComparisonsAreAsSureAsTheySay(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	const rounds = 20_000
	held, wrong := 0, 0
	for range rounds {
		truth := math.Exp(rng.NormFloat64() / 5)
		sa, sb := 0.02+rng.Float64()/10, 0.02+rng.Float64()/10
		measured := func(rate, stdErr float64) Capacity {
			return Capacity{Rate: rate * math.Exp(stdErr*rng.NormFloat64()), StdErr: stdErr, Bound: Exact}
		}
		c, ok := Compare(measured(truth, sa), measured(1, sb))
		if ok && c.Lowest <= truth && truth <= c.Highest {
			held++
		}
		if twin, ok := Compare(measured(1, sa), measured(1, sb)); ok && twin.Distinguishable() {
			wrong++
		}
	}
	if part := float64(held) / rounds; math.Abs(part-0.95) > 0.01 {
		t.Errorf("the interval holds the ratio in %.1f %%, want 95 %%", 100*part)
	}
	if part := float64(wrong) / rounds; math.Abs(part-0.025) > 0.005 {
		t.Errorf("%.1f %% of equals are called better, want 2.5 %%", 100*part)
	}
}

// Each round picks the best of n measured capacities, and compares it with a reference. All true capacities are equal.
// For any n, at most 2.5 % of the rounds call the best one better than the reference. In at most 2.5 % of the rounds,
// the lower end of its interval lies above the true capacity.
func TestTheBestOfManyEqualsIsNoBetter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 6))
	for _, n := range []int{1, 2, 8, 30} {
		const rounds = 6_000
		wrong, above, alone := 0, 0, 0
		for range rounds {
			measured := func() Capacity {
				c := Capacity{StdErr: 0.02 + rng.Float64()/10, Bound: Exact}
				c.Rate = math.Exp(c.StdErr * rng.NormFloat64())
				c.Lowest = c.Rate * math.Exp(-deviations*c.StdErr)
				return c
			}
			reference, best := measured(), measured()
			for range n - 1 {
				if c := measured(); c.Rate > best.Rate {
					best = c
				}
			}
			c, ok := Compare(best, reference)
			if !ok {
				t.Fatal("two exact capacities are not compared")
			}
			if c.Among(n).Distinguishable() != (c.Among(n).Lowest > 1) {
				t.Fatalf("%+v: Distinguishable and the interval contradict each other", c.Among(n))
			}
			if c.Distinguishable() {
				alone++
			}
			if c.Among(n).Distinguishable() {
				wrong++
			}
			if best.Among(n).Lowest > 1 {
				above++
			}
		}
		t.Logf("of %d: %d of %d called better, %d without the choice allowed for; %d lower ends too high", n, wrong, rounds, alone, above)
		if most := 0.025 + 2.5*math.Sqrt(0.025/rounds); float64(wrong)/rounds > most || float64(above)/rounds > most {
			t.Errorf("of %d: %d of %d are called better and %d lower ends are too high, want 2.5 %% at most", n, wrong, rounds, above)
		}
		if n == 30 && float64(alone)/rounds < 0.1 {
			t.Errorf("only %d of %d best of 30 seem better without the correction for the choice: the test tests nothing", alone, rounds)
		}
	}
}

// If two searches send the same requests, chance moves both capacities the same way. In their ratio it cancels out.
func TestTheSameLuckIsNotInTheRatio(t *testing.T) {
	of := func(draw int, moved ...float64) Capacity {
		c := Capacity{Rate: 2, StdErr: 0.1, Bound: Exact}
		for block, m := range moved {
			c.Pieces = append(c.Pieces, Piece{Draw: draw, Block: block, Moved: m})
		}
		return c
	}
	one := of(3, 0.02, -0.01, 0.03, -0.04)
	for _, row := range []struct {
		name string
		b    Capacity
		want float64 // standard error of ln(ratio), as a multiple of one capacity's standard error
	}{
		{"other requests", of(4, 0.02, -0.01, 0.03, -0.04), math.Sqrt2},
		{"no pieces are known", of(3), math.Sqrt2},
		{"the same requests, moved equally", one, math.Sqrt(2 - 2*maxCorrelation)},
		{"the same requests, moved twice as far", of(3, 0.04, -0.02, 0.06, -0.08), math.Sqrt(2 - 2*maxCorrelation)},
		{"the same requests, half of them moved", of(3, 0.02, -0.01, 0, 0), math.Sqrt(2 - 2*0.408)},
		{"the same requests, moved the other way by chance", of(3, -0.02, 0.01, -0.03, 0.04), math.Sqrt2},
	} {
		for _, pair := range [][2]Capacity{{one, row.b}, {row.b, one}} {
			c, ok := Compare(pair[0], pair[1])
			if got := math.Log(c.Highest/c.Ratio) / deviations / 0.1; !ok || math.Abs(got-row.want) > 1e-3 {
				t.Errorf("%s: the interval is %.3f standard errors wide, want %.3f", row.name, got, row.want)
			}
		}
	}
}
