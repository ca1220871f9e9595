package capacity

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// truth returns a Probe of a server whose headroom falls by one each time the rate doubles. The Probe appends each rate
// to the list probed.
func truth(capacity float64, probed *[]float64) Probe {
	return func(_ context.Context, rate float64) (Outcome, error) {
		*probed = append(*probed, rate)
		h := math.Log2(capacity / rate)
		return Outcome{Pass: h >= 0, Headroom: h, Binding: "p99 TTFT", InFlight: 20 * rate}, nil
	}
}

func search(hint float64) Search {
	return Search{Hint: hint, Min: 0.05, Max: 200, Factor: 1.35, Tolerance: 0.2, MaxProbes: 12}
}

func TestFind(t *testing.T) {
	narrow := search(2)
	narrow.MaxProbes = 2
	for _, row := range []struct {
		name      string
		search    Search
		capacity  float64
		bound     Bound
		maxProbes int
		why       string
	}{
		{"a good hint takes three or four probes", search(2), 2.3, Exact, 4, "bracketed"},
		{"a hint that is too high gallops down", search(2), 0.4, Exact, 7, "bracketed"},
		{"a hint that is too low gallops up", search(2), 17, Exact, 8, "bracketed"},
		{"everything passes up to the highest rate", search(150), 1000, AtLeast, 2, "passed at the highest rate, 200 req/s"},
		{"everything fails down to the lowest rate", search(0.06), 0.001, AtMost, 2, "failed at the lowest rate, 0.05 req/s"},
		{"probes run out before a bracket", narrow, 100, AtLeast, 2, "the budget of 2 probes is spent"},
	} {
		var probed []float64
		c, err := row.search.Find(t.Context(), truth(row.capacity, &probed))
		if err != nil {
			t.Fatal(err)
		}
		if c.Bound != row.bound || c.Probes > row.maxProbes || c.Probes != len(probed) || !strings.Contains(c.Why, row.why) {
			t.Errorf("%s: %+v after %v, want %s in at most %d probes because %q", row.name, c, probed, row.bound, row.maxProbes, row.why)
		}
		if c.Bound == Exact && (math.Abs(c.Rate/row.capacity-1) > 0.01 || c.Low > row.capacity || c.High < row.capacity) {
			t.Errorf("%s: found %+v, want %g", row.name, c, row.capacity)
		}
		if c.Bound == Exact && math.Abs(c.InFlight-20*c.Rate) > 1e-6*c.Rate {
			t.Errorf("%s: %g in flight at %g req/s, want %g", row.name, c.InFlight, c.Rate, 20*c.Rate)
		}
	}
}

// A probe ends early at rates above 0.45 req/s. The server carries 0.2 req/s. Without the short steps, the search would go
// from 0.33 to 0.099 req/s.
func TestStepsDownAreShortNearTheBoundary(t *testing.T) {
	var probed []float64
	server := truth(0.2, &probed)
	_, err := search(2).Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
		o, err := server(ctx, rate)
		o.Seen = min(1, 0.45/rate)
		return o, err
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := []float64{2, 1.48, 0.812, 0.33, 0.244, 0.134, 0.181, 0.21}; !slices.Equal(probed, want) {
		t.Errorf("probed %v, want %v", probed, want)
	}
}

// The search ends for any verdicts, even random ones that contradict each other. It stays between Min and Max, and its
// answer is inside its bracket.
func TestFindEndsForAnyAnswers(t *testing.T) {
	for seed := range uint64(2000) {
		rng := rand.New(rand.NewPCG(seed, 1))
		s := Search{Hint: math.Exp(rng.NormFloat64() * 3), Min: 0.01 + rng.Float64(), Max: 2 + rng.Float64()*100, Factor: 1.01 + rng.Float64(), Tolerance: 0.001 + rng.Float64(), MaxProbes: 1 + rng.IntN(30)}
		c, err := s.Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
			if rate < s.Min || rate > s.Max {
				t.Fatalf("seed %d: probed %g outside %g..%g", seed, rate, s.Min, s.Max)
			}
			return Outcome{Pass: rng.IntN(2) == 0, Headroom: rng.NormFloat64() * math.Pow(10, float64(rng.IntN(5)-2))}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if c.Probes > s.MaxProbes || c.Why == "" || math.IsNaN(c.Rate) || c.Rate <= 0 {
			t.Fatalf("seed %d: Find = %+v for %+v", seed, c, s)
		}
		if c.Bound == Exact && (c.Rate < c.Low || c.Rate > c.High) {
			t.Fatalf("seed %d: %g is outside its bracket %g..%g", seed, c.Rate, c.Low, c.High)
		}
	}
}

// A late load generator says nothing about the server. A rate that passed is a lower bound. The bound is sure only if
// the generator was in time.
func TestALimitedGeneratorGivesALowerBound(t *testing.T) {
	limitedFrom := func(limit float64, pass bool) Probe {
		return func(_ context.Context, rate float64) (Outcome, error) {
			if rate >= limit {
				return Outcome{Pass: pass, Headroom: -1, Limited: "the load generator was 300 ms late"}, nil
			}
			return Outcome{Pass: true, Headroom: 1, InFlight: 20 * rate}, nil
		}
	}
	for _, pass := range []bool{true, false} {
		c, err := search(2).Find(t.Context(), limitedFrom(5, pass))
		rate := c.Low
		if pass {
			rate = 200 // the highest rate that may be offered
		}
		if err != nil || c.Bound != AtLeast || c.Low >= 5 || c.Low < 4 || c.Rate != rate || c.High != 0 || c.Limited == "" || !strings.Contains(c.Why, "300 ms late") {
			t.Errorf("Find = %+v, %v, want at least %g req/s, 4 to 5 of them for sure, because of the generator", c, err, rate)
		}
	}
	if _, err := search(2).Find(t.Context(), limitedFrom(0, false)); !errors.Is(err, ErrLimited) {
		t.Errorf("Find = %v, want that the generator is the limit", err)
	}
}

// If a contradicting verdict removes one end of the bracket, the search looks for a new end nearby. It does not gallop
// away.
func TestALostBracketIsLookedForNearby(t *testing.T) {
	s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(1, 8))}
	look := search(4)
	look.Population, look.Precision, look.MaxProbes = s.population(), 0.01, 30
	probe, highest := s.probe(60, 1), 0.0
	if _, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
		highest = max(highest, rate)
		o, err := probe(ctx, rate)
		o.Pass = highest > rate // a probe fails if its rate is the highest so far
		return o, err
	}); err != nil {
		t.Fatal(err)
	}
	if highest > 12 {
		t.Errorf("a server that carries at most 6 req/s was offered %g", highest)
	}
}

// The same holds downwards: only the first probe passes here, so that later fails remove the lower end.
func TestALostBracketIsLookedForNearbyBelow(t *testing.T) {
	s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(1, 8))}
	look := search(4)
	look.Population, look.Precision, look.MaxProbes = s.population(), 0.01, 12
	probe, undone := s.probe(60, 1), false
	var probed []float64
	if _, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
		o, err := probe(ctx, rate)
		if lowest := slices.Min(append(probed, 4)); rate < lowest {
			undone = true
			if lowest/rate > 1.36 {
				t.Errorf("probed %g after %v: a step of more than a factor of 1.35", rate, probed)
			}
		}
		probed = append(probed, rate)
		o.Pass, o.Seen = len(probed) == 1, 1
		return o, err
	}); err != nil {
		t.Fatal(err)
	}
	if !undone {
		t.Errorf("probed %v: no fail below the first rate", probed)
	}
}

// A failed request or a growing queue fails a probe whose other requests kept the limits. Those requests do not outvote
// the fail.
func TestAFailThatNoRequestExplainsStands(t *testing.T) {
	const cliff = 5.08 // req/s; the latency limits alone would allow 6.35 req/s
	for seed := range uint64(4) {
		s := &synthetic{halfRate: 9, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(seed, 8))}
		probe := s.probe(240, 1)
		look := search(4.45)
		look.Population, look.Precision = s.population(), float64(seed%2)*0.05
		c, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
			o, err := probe(ctx, rate)
			if rate > cliff {
				o.Pass, o.Headroom, o.Binding = false, -0.01, "error rate"
			}
			return o, err
		})
		if err != nil || c.Bound != Exact || c.Low > cliff || c.High < cliff || c.Binding != "error rate" || c.StdErr != 0 {
			t.Errorf("seed %d: Find = %+v, %v; want it bracketed by the error rate at %g, without an interval", seed, c, err, cliff)
		}
	}
}

// One stall of the load generator never turns the answer into a bound, whichever probe it hits.
func TestAHiccupOfTheGeneratorIsNoBound(t *testing.T) {
	for at := range 5 {
		s := &synthetic{halfRate: 6, k: kernel{5, false, 0.5}, rng: rand.New(rand.NewPCG(uint64(at), 9))}
		probe := s.probe(120, 1)
		look := search(3)
		look.Population, look.Precision, look.MaxProbes = s.population(), 0.1, 40
		n := 0
		c, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
			o, err := probe(ctx, rate)
			if n++; n == at+1 {
				o.Pass, o.Limited = false, "it stood still"
			}
			return o, err
		})
		if err != nil || c.Bound != Exact || c.StdErr == 0 || n <= at {
			t.Errorf("stalled in probe %d of %d: Find = %+v, %v; want an exact capacity with an interval", at+1, n, c, err)
		}
	}
}

func TestABracketDoesNotDependOnTheOrder(t *testing.T) {
	step := func(rate float64, pass bool) Step { return Step{Rate: rate, Outcome: Outcome{Pass: pass, Headroom: 1}} }
	for _, steps := range [][]Step{
		{step(2, true), step(4, true), step(4, false)},
		{step(2, true), step(4, false), step(4, true)},
	} {
		if low, high := bracket(steps); low == nil || high == nil || low.Rate != 2 || high.Rate != 4 {
			t.Errorf("bracket(%v) = %v to %v, want 2 to 4", steps, low, high)
		}
	}
}

// A budget counts the time that probes took, not the time that they were expected to take.
func TestABudgetIsOfTheTimeThatWasTaken(t *testing.T) {
	var probed []float64
	look := search(2)
	look.Cost = func(float64) time.Duration { return time.Minute }
	look.Budget = 10 * time.Minute
	spent := time.Duration(0)
	find := truth(17, &probed)
	c, err := look.Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
		o, err := find(ctx, rate)
		o.Took = 3 * time.Minute
		spent += o.Took
		return o, err
	})
	if err != nil || spent > look.Budget+2*time.Minute || !strings.Contains(c.Why, "is spent") {
		t.Errorf("the search spent %s of %s and ended because %q, %v", spent, look.Budget, c.Why, err)
	}
}

// A search that ends with an error also returns the capacity known so far.
func TestAnErrorDoesNotLoseWhatIsKnown(t *testing.T) {
	var probed []float64
	find := truth(17, &probed)
	gone := errors.New("gone")
	c, err := search(2).Find(t.Context(), func(ctx context.Context, rate float64) (Outcome, error) {
		if len(probed) == 2 {
			return Outcome{}, gone
		}
		return find(ctx, rate)
	})
	if !errors.Is(err, gone) || c.Bound != AtLeast || c.Probes != 2 || c.Rate != probed[1] {
		t.Errorf("Find = %+v, %v; want the capacity by two probes, and the error", c, err)
	}
}
