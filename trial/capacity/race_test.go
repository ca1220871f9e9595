package capacity

import (
	"cmp"
	"context"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
)

// A twin is a server of the tests. All twins have the same noise in the same draw (one set of random requests). The
// headroom of a twin falls as its batch grows.
type twin struct {
	fall     float64 // how much the headroom falls when the rate grows by a factor of e; 0 means 1
	capacity float64 // requests per second
	noise    float64 // standard deviation of its own noise, beside the noise of the draw
	rng      *rand.Rand
	binding  string
	probed   []float64
}

// hardness is how far a draw (one set of random requests) moves the capacity of every server, in ln rate.
func hardness(draw int) float64 { return 0.1 * math.Sin(float64(7*draw+3)) }

func (s *twin) probe(_ context.Context, rate float64) (Outcome, error) {
	draw := len(s.probed)
	s.probed = append(s.probed, rate)
	fall := cmp.Or(s.fall, 1)
	h := fall*(math.Log(s.capacity/rate)+hardness(draw)) + s.noise*s.rng.NormFloat64()
	each := strings.Repeat(string(kept), 300)
	return Outcome{
		Pass: h >= 0, Headroom: max(-3, min(3, h)), Binding: s.binding, InFlight: 20 * rate, Seen: 1,
		Evidence: &Evidence{Rate: rate, Draw: draw, Limits: []LimitEvidence{{Name: s.binding, Allowed: 0.01, Headroom: max(-3, min(3, h)), Each: each}}},
	}, nil
}

func twinServer(capacity float64, seed uint64) *twin {
	return &twin{capacity: capacity, noise: 0.03, rng: rand.New(rand.NewPCG(seed, 5)), binding: "p99 TPOT"}
}

// raceAgainst returns a race against a server of capacity 2 that was measured in full.
func raceAgainst(t *testing.T, seed uint64) Search {
	t.Helper()
	best, err := search(2).Find(t.Context(), twinServer(2, seed).probe)
	if err != nil || best.Bound != Exact {
		t.Fatalf("the best: %+v, %v", best, err)
	}
	best.StdErr = 0.05
	s := search(1)
	s.Race = Race{Best: best, Steps: best.Steps, MinGain: 0.01}
	return s
}

func TestARaceSpendsLittleOnLosers(t *testing.T) {
	for _, row := range []struct {
		name      string
		part      float64 // the server's capacity, as a multiple of the best capacity
		maxProbes float64 // highest allowed mean number of probes
		wins      bool
	}{
		{"half as good", 0.5, 2, false},
		{"a tenth worse", 0.9, 1.6, false},
		{"as good", 1, 3.5, false},
		{"a tenth better", 1.1, 5, true},
		{"twice as good", 2, 7, true},
		{"six times as good", 6, 11, true},
	} {
		const seeds = 40
		probes, won, off := 0, 0, 0.0
		for seed := range uint64(seeds) {
			s, server := raceAgainst(t, seed), twinServer(2*row.part, seed+1000)
			c, err := s.Find(t.Context(), server.probe)
			if err != nil {
				t.Fatal(err)
			}
			if len(server.probed) != c.Probes || c.Why == "" {
				t.Fatalf("%s, seed %d: %+v after %v", row.name, seed, c, server.probed)
			}
			if c.Bound != AtMost {
				off += math.Abs(math.Log(c.Rate / s.Race.Best.Rate / row.part))
			}
			probes += c.Probes
			if c.Met() && c.Carried() > s.Race.Best.Carried() {
				won++
			}
		}
		if mean := float64(probes) / seeds; mean > row.maxProbes {
			t.Errorf("%s: %.1f probes a race, want at most %g", row.name, mean, row.maxProbes)
		}
		if row.wins && won < seeds*8/10 || row.part < 0.95 && won > seeds/20 {
			t.Errorf("%s: won %d of %d races", row.name, won, seeds)
		}
		if row.part > 0.6 && row.part < 1.5 && off/seeds > 0.06 {
			t.Errorf("%s: the ratio is off by %.3f in the mean, want at most 0.06", row.name, off/seeds)
		}
	}
}

// Only the requests that both servers had are compared. Here the first draw (set of random requests) is hard, and
// equally hard for both servers.
func TestAHardDrawMakesNoLoser(t *testing.T) {
	s := raceAgainst(t, 3)
	s.MaxProbes = 1
	server := twinServer(2*1.02, 4)
	c, err := s.Find(t.Context(), server.probe)
	if err != nil {
		t.Fatal(err)
	}
	alone := math.Log(server.probed[0]) - math.Log(2*1.02)
	if ratio := c.Rate / s.Race.Best.Rate; math.Abs(math.Log(ratio/1.02)) > 0.08 || c.StdErr == 0 || math.Abs(alone) < 0.02 {
		t.Errorf("one probe tells a ratio of %.3f (%+v), want 1.02", ratio, c)
	}
}

// A server may have a small batch: each token is quick, but a queue forms at a rate that the best server carries
// easily. The time per token then promises a capacity far above the rate that failed.
func TestAQueueThatTheBestLacksBoundsARace(t *testing.T) {
	answer := func(quick, cliff float64) func(context.Context, float64) (Outcome, error) {
		draw := -1
		return func(_ context.Context, rate float64) (Outcome, error) {
			draw++
			tokens := LimitEvidence{Name: "p99 TPOT", Allowed: 0.01, Headroom: 0.5 * (math.Log(quick/rate) + hardness(draw)), Each: strings.Repeat(string(kept), 300)}
			first := LimitEvidence{Name: "p99 TTFT", Queue: true, Allowed: 0.01, Headroom: 0.7, Each: tokens.Each}
			if rate > cliff {
				first.Headroom, first.Each = -2, strings.Repeat(string(over), 300)
			}
			binding := first
			if tokens.Headroom < first.Headroom {
				binding = tokens
			}
			return Outcome{
				Pass: binding.Headroom >= 0, Headroom: binding.Headroom, Binding: binding.Name, InFlight: 20 * rate, Seen: 1,
				Evidence: &Evidence{Rate: rate, Draw: draw, Limits: []LimitEvidence{tokens, first}},
			}, nil
		}
	}
	best, err := search(2).Find(t.Context(), answer(2.2, 100))
	if err != nil || best.Bound != Exact {
		t.Fatalf("the best: %+v, %v", best, err)
	}
	s := search(1)
	s.Race = Race{Best: best, Steps: best.Steps, MinGain: 0.01}
	c, err := s.Find(t.Context(), answer(5, 1.85))
	if err != nil || c.Rate > 2.05 || c.Rate < 1.6 || c.StdErr > 0.15 || !strings.HasPrefix(c.Why, "lost the race") {
		t.Errorf("a server whose queue grows from 1.85 req/s on races to %+v, %v; want a sure loser near 1.85", c, err)
	}
}

// A server that seems worse by an unknown amount gets a third probe, inside its bracket. One that is surely worse does not.
func TestAnUnsureLoserGetsOneMoreProbe(t *testing.T) {
	for _, row := range []struct {
		stdErr float64 // of the best server's capacity
		third  bool
	}{{0.05, false}, {0.15, true}} {
		l := searchState{Search: Search{Min: 0.1, Max: 10, Tolerance: 0.1, MaxProbes: 9, Race: Race{
			Best: Capacity{Rate: 2, StdErr: row.stdErr, Bound: Exact}, MinGain: 0.01,
		}}}
		l.add(Step{2.1, Outcome{Seen: 1}})
		l.add(Step{1.6, Outcome{Pass: true, Seen: 1}})
		rate, why, lost := l.nextOfRace()
		if lost == row.third || row.third && (rate <= 1.6 || rate >= 2.1) {
			t.Errorf("the best has an error of %g: next %g req/s, lost %v (%s)", row.stdErr, rate, lost, why)
		}
		l.add(Step{1.8, Outcome{Seen: 1}})
		if _, why, lost := l.nextOfRace(); !lost {
			t.Errorf("the race goes on after three probes: %s", why)
		}
	}
}

// A pass alone may be luck, so it makes no capacity that could win.
func TestAPassAloneDoesNotWin(t *testing.T) {
	s := raceAgainst(t, 1)
	s.MaxProbes = 1
	c, err := s.Find(t.Context(), twinServer(4, 1).probe)
	if err != nil || c.Met() || c.Bound != Estimated || c.Low == 0 || c.High != 0 {
		t.Errorf("after a single pass: %+v, %v; want an estimate", c, err)
	}
}

// A pass at the highest rate that may be offered is a lower bound, also in a race.
func TestAPassAtTheHighestRateIsABound(t *testing.T) {
	s := raceAgainst(t, 1)
	s.Max = 2.3
	c, err := s.Find(t.Context(), twinServer(4, 1).probe)
	if err != nil || c.Bound != AtLeast || c.Carried() != 2.3 {
		t.Errorf("after passing at the highest rate: %+v, %v; want at least 2.3", c, err)
	}
}

// A race climbs faster with each pass after the second, but not after a fail.
func TestARaceClimbsFasterAfterPasses(t *testing.T) {
	pass, fail := Outcome{Pass: true}, Outcome{}
	for _, row := range []struct {
		steps []Step
		want  float64
	}{
		{[]Step{{1, pass}}, raceUp},
		{[]Step{{1, pass}, {1.1, pass}}, raceUp},
		{[]Step{{1, pass}, {1.1, pass}, {1.1, pass}}, raceUp}, // the second probe was repeated
		{[]Step{{1, pass}, {1.1, pass}, {1.2, pass}}, raceUp * raceUp},
		{[]Step{{1, pass}, {1.1, pass}, {1.2, pass}, {1.5, pass}, {2, pass}}, maxAscent},
		{[]Step{{1, fail}, {1, pass}, {1.1, pass}, {1.2, pass}}, raceUp},
	} {
		l := searchState{steps: row.steps}
		if got := l.ascent(); math.Abs(got/row.want-1) > 1e-9 {
			t.Errorf("after %d steps the rate rises by %g, want %g", len(row.steps), got, row.want)
		}
	}
}

// A server that fails at once and tells nothing is given up before it costs much.
func TestAHopelessServerIsGivenUp(t *testing.T) {
	s := raceAgainst(t, 1)
	n := 0
	c, err := s.Find(t.Context(), func(context.Context, float64) (Outcome, error) {
		n++
		return Outcome{Headroom: -3, Binding: "error rate", Seen: 0.1}, nil
	})
	if err != nil || n != maxLost || c.Bound != AtMost || !strings.HasPrefix(c.Why, "lost the race") {
		t.Errorf("after %d probes %+v, %v; want at most after %d", n, c, err, maxLost)
	}
}

// A race ends for any verdicts, stays between the lowest and the highest rate, and goes on after an interruption as it
// would have without one.
func TestARaceEndsAndResumesForAnyAnswers(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := raceAgainst(t, seed)
		s.Min, s.Max, s.MaxProbes = 0.5+rng.Float64(), 2+rng.Float64()*4, 1+rng.IntN(12)
		var steps []Step
		whole, err := s.Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
			if rate < s.Min || rate > s.Max {
				t.Fatalf("seed %d: probed %g outside %g..%g", seed, rate, s.Min, s.Max)
			}
			o, _ := twinServer(math.Exp(rng.NormFloat64()), seed).probe(t.Context(), rate)
			o.Pass, o.Headroom, o.Evidence.Draw, o.Seen = rng.IntN(2) == 0, 4*rng.NormFloat64(), len(steps), rng.Float64()+0.5
			o.Evidence.Limits[0].Headroom = o.Headroom
			steps = append(steps, Step{rate, o})
			return o, nil
		})
		if err != nil || whole.Probes > s.MaxProbes || math.IsNaN(whole.Rate) || whole.Rate <= 0 || whole.Lowest > whole.Rate {
			t.Fatalf("seed %d: %+v, %v", seed, whole, err)
		}
		had := rng.IntN(len(steps) + 1)
		s.Known = steps[:had]
		at := had
		again, err := s.Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
			if at >= len(steps) || steps[at].Rate != rate {
				t.Fatalf("seed %d: after %d steps it probes %g, want %v", seed, at, rate, steps[at:])
			}
			at++
			return steps[at-1].Outcome, nil
		})
		if err != nil || !reflect.DeepEqual(again, whole) {
			t.Fatalf("seed %d: resumed after %d steps: %+v, %v; want %+v", seed, had, again, err, whole)
		}
	}
}
