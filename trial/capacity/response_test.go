package capacity

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
)

// stepAt is a probe of one limit.
func stepAt(rate float64, limit string, headroom, share float64) Step {
	slow := int(math.Round(share * 300))
	each := strings.Repeat(string(over), slow) + strings.Repeat(string(kept), 300-slow)
	l := LimitEvidence{Name: limit, Queue: strings.Contains(limit, "TTFT"), Allowed: 0.01, Headroom: headroom, Each: each}
	return Step{rate, Outcome{Pass: headroom >= 0, Headroom: headroom, Binding: limit, Seen: 1, Evidence: &Evidence{Rate: rate, Limits: []LimitEvidence{l}}}}
}

// The steps of a server show how fast the headroom falls. One step alone shows nothing, so the prior fall holds.
func TestAResponseIsLearned(t *testing.T) {
	line := func(limit string, fall float64, rates ...float64) (steps []Step) {
		for _, rate := range rates {
			steps = append(steps, stepAt(rate, limit, fall*math.Log(2/rate), 0))
		}
		return steps
	}
	for _, row := range []struct {
		name      string
		steps     []Step
		low, high float64
	}{
		{"one step", line("p99 TPOT", 0.3, 2), 1, 1},
		{"a flat time per token", line("p99 TPOT", 0.3, 1.8, 2, 2.4), 0.3, 0.4},
		{"a steep time per token", line("p99 TPOT", 2, 1.8, 2, 2.2), 1.7, 2},
		{"one step of a queue", line("p99 TTFT", 1, 2), 10, 10},
		{"a flat queue", line("p99 TTFT", 1, 1.5, 1.8, 2, 2.4), 1, 3},
		{"a headroom that grows with the rate", line("p99 TPOT", -1, 1.5, 2, 3), perToken.minFall, perToken.minFall},
	} {
		got := responses(row.steps)
		if len(got) != 1 || got[0].fall < row.low-1e-9 || got[0].fall > row.high+1e-9 {
			t.Errorf("%s: %+v, want a fall of %g to %g", row.name, got, row.low, row.high)
		}
	}
}

// The limit with the nearest boundary decides, not the one with the least headroom.
func TestTheNearestBoundaryDecides(t *testing.T) {
	token, queued := LimitEvidence{Name: "p99 TPOT"}, LimitEvidence{Name: "p99 TTFT", Queue: true}
	for _, row := range []struct {
		token, queued, want float64 // headrooms, and ln rate of the boundary
	}{{0.02, 0.5, 0.02}, {0.2, 0.5, 0.05}, {-0.1, 0.5, -0.1}} {
		token.Headroom, queued.Headroom = row.token, row.queued
		step := Step{1, Outcome{Binding: "p99 TPOT", Seen: 1, Evidence: &Evidence{Rate: 1, Limits: []LimitEvidence{token, queued}}}}
		if at, _, ok := step.boundary(responses([]Step{step})); !ok || math.Abs(at-row.want) > 1e-9 {
			t.Errorf("headrooms %g and %g: boundary at %g, %v; want %g", row.token, row.queued, at, ok, row.want)
		}
	}
}

// If a queue has broken its limit, a rate far past the boundary shows no distance to it.
func TestAQueueThatGrowsTellsLittle(t *testing.T) {
	steps := []Step{stepAt(2, "p99 TTFT", 1, 0), stepAt(2.3, "p99 TTFT", -0.5, 0.02)}
	limits := responses(steps)
	for _, row := range []struct {
		share     float64
		tells     bool
		low, high float64 // range of the boundary, as a multiple of the probe's rate
	}{{0.02, true, 0.85, 0.98}, {0.4, true, 0.7, 0.85}, {0.9, false, 0, 0}} {
		step := stepAt(3, "p99 TTFT", -2.5, row.share)
		at, off, ok := step.boundary(limits)
		if part := math.Exp(at) / 3; ok != row.tells || ok && (part < row.low || part > row.high || off < 0.05) {
			t.Errorf("%.0f %% slow: boundary at %.2f of the rate ± %.2f, %v; want %g to %g, %v", 100*row.share, part, off, ok, row.low, row.high, row.tells)
		}
	}
}

// A time per token that hardly grows with the rate has little headroom far from the boundary. A server that passes
// above the best capacity has not lost, and a better one is found to be better.
func TestAFlatLimitLosesNoRace(t *testing.T) {
	const seeds, fall = 40, 0.3
	flat := func(capacity float64, seed uint64) Probe {
		server := twinServer(capacity, seed)
		server.noise, server.fall = 0.01, fall
		return server.probe
	}
	won := 0
	for seed := range uint64(seeds) {
		best, err := search(2).Find(t.Context(), flat(2, seed))
		if err != nil || best.Bound != Exact {
			t.Fatalf("the best: %+v, %v", best, err)
		}
		best.StdErr = 0.05
		s := search(1)
		s.Race = Race{Best: best, Steps: best.Steps, MinGain: 0.01}
		c, err := s.Find(t.Context(), flat(2*1.2, seed+1000))
		if err != nil {
			t.Fatal(err)
		}
		if c.High == 0 && strings.HasPrefix(c.Why, "lost") {
			t.Errorf("seed %d: lost without a fail: %+v", seed, c)
		}
		if c.Met() && c.Carried() > best.Carried() {
			won++
		}
	}
	if won < seeds*3/4 {
		t.Errorf("a server that carries a fifth more won %d of %d races", won, seeds)
	}
}

// Responses to any evidence give boundaries that are numbers.
func TestAnyEvidenceGivesNumbers(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for range 2000 {
		var steps []Step
		for range 1 + rng.IntN(4) {
			limit := []string{"p99 TTFT", "p99 TPOT"}[rng.IntN(2)]
			steps = append(steps, stepAt(math.Exp(3*rng.NormFloat64()), limit, 6*rng.NormFloat64(), rng.Float64()))
		}
		limits := responses(steps)
		for _, s := range steps {
			if at, off, ok := s.boundary(limits); ok && (math.IsNaN(at) || math.IsInf(at, 0) || !(off > 0)) {
				t.Fatalf("boundary %g ± %g of %+v by %+v", at, off, s, limits)
			}
		}
	}
}
