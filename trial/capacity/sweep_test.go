package capacity

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestHighestReadsAGrid(t *testing.T) {
	for _, row := range []struct {
		name, steps     string
		rate, low, high float64
		bound           Bound
		binding         string
		below           []float64
	}{
		{"the last pass before the fails", "0.5p 1p 2f 4f", 1, 1, 2, Exact, "p99 TTFT", nil},
		{"all pass", "0.5p 1p 2p 4p", 4, 4, 0, AtLeast, "p99 TPOT", nil},
		{"none passes", "0.5f 1f 2f 4f", 0.5, 0, 0.5, AtMost, "p99 TTFT", nil},
		{"a fail below a pass", "0.5p 1f 2p 4f", 2, 2, 4, Exact, "p99 TTFT", []float64{1}},
		{"fails below the last pass", "0.5f 1f 2p 4p", 4, 4, 0, AtLeast, "p99 TPOT", []float64{0.5, 1}},
		{"a late client is no fail", "0.5p 1p 2l 4l", 1, 1, 0, AtLeast, "p99 TPOT", nil},
		{"a late client is no pass", "0.5p 1p 2L 4f", 1, 1, 4, AtLeast, "p99 TPOT", nil},
		{"a late client below a pass", "0.5L 1p 2p 4f", 2, 2, 4, Exact, "p99 TTFT", nil},
		{"a fail above late passes is not the lowest load", "0.5l 1L 2f 4f", 0, 0, 2, "", "", nil},
		{"a fail below late passes is the lowest load", "0.5f 1l 2L 4f", 0.5, 0, 0.5, AtMost, "p99 TTFT", nil},
		{"a late client alone says nothing", "0.5l 1l 2l 4l", 0, 0, 0, "", "", nil},
	} {
		all := said(t, row.steps)
		slices.Reverse(all) // Highest must not depend on the order
		c, below := Highest(all)
		if c.Rate != row.rate || c.Low != row.low || c.High != row.high || c.Bound != row.bound || c.Binding != row.binding || !slices.Equal(below, row.below) {
			t.Errorf("%s: Highest(%s) = %+v, below %v; want rate %g, low %g, high %g, %q by %q, below %v", row.name, row.steps, c, below, row.rate, row.low, row.high, row.bound, row.binding, row.below)
		}
		if c.Probes != 4 || c.Why == "" || strings.ContainsAny(row.steps, "lL") != strings.Contains(c.Why, late) {
			t.Errorf("%s: %d probes, because %q", row.name, c.Probes, c.Why)
		}
		if row.bound != "" && c.InFlight != 10*row.rate {
			t.Errorf("%s: %g requests in flight, want as many as at %g req/s", row.name, c.InFlight, row.rate)
		}
	}
	if c, below := Highest(nil); c.Met() || c.Bound != "" || below != nil {
		t.Errorf("Highest of nothing = %+v, %v", c, below)
	}
}

// late is the text that these tests use for Outcome.Limited.
const late = "the load generator was 17.5 ms late at p99"

// said parses steps. Each is a rate and a letter: p passed, f failed, L passed with a late load generator, l failed
// only because of a late load generator. TPOT breaks first in a step that passed, TTFT in one that failed.
func said(t *testing.T, text string) (steps []Step) {
	t.Helper()
	for word := range strings.FieldsSeq(text) {
		letter := word[len(word)-1]
		rate, err := strconv.ParseFloat(word[:len(word)-1], 64)
		if err != nil {
			t.Fatal(err)
		}
		s := Step{Rate: rate, Outcome: Outcome{Headroom: -0.1, Binding: "p99 TTFT", InFlight: 10 * rate}}
		if letter == 'p' || letter == 'L' {
			s.Pass, s.Headroom, s.Binding = true, 0.1, "p99 TPOT"
		}
		if letter == 'l' || letter == 'L' {
			s.Limited = late
		}
		steps = append(steps, s)
	}
	return steps
}

// A late load generator proves nothing against the server. A pass is then a lower bound, and a fail is no evidence.
func TestALateClientIsNeverAFail(t *testing.T) {
	const unknown Bound = ""
	for _, row := range []struct {
		name, steps     string
		bound           Bound
		rate, low, high float64
		limited         bool
	}{
		{"as on a busy machine", "60f 32.9L 24.4L 18.1L", AtLeast, 32.9, 0, 60, true},
		{"with a pass that counts below", "20p 40L 40L 60f", AtLeast, 40, 20, 60, true},
		{"a fail that counts says otherwise", "40L 20f 10p", Exact, 14, 10, 20, false},
		{"a fail that counts, and nothing below", "40L 20f 0.05f", AtMost, 0.05, 0, 0.05, false},
		{"late fails below a fail are not fails", "20f 10l 10l 5l", unknown, 0, 0, 0, true},
		{"late fails alone", "20l 20l", unknown, 0, 0, 0, true},
		{"late fails above a pass", "20p 40l 40l", AtLeast, 20, 20, 0, true},
		{"a late fail between verdicts that count", "20p 24f 22l", Exact, 22, 20, 24, false},
		{"late passes above a late fail", "20l 20l 10L 30L", AtLeast, 30, 0, 0, true},
		{"a late pass that was repeated well", "20L 40f 20p", Exact, 28, 20, 40, false},
		{"a late pass that failed when it was repeated", "20L 20f 10p", Exact, 14, 10, 20, false},
	} {
		s := search(20)
		s.Known = said(t, row.steps)
		s.MaxProbes = len(s.Known)
		c, err := s.Find(t.Context(), func(context.Context, float64) (Outcome, error) { return Outcome{}, errors.New("one probe too many") })
		if row.bound == unknown {
			if !errors.Is(err, ErrLimited) || !strings.Contains(err.Error(), late) {
				t.Errorf("%s: %s is %+v, %v; want that the load generator is the limit", row.name, row.steps, c, err)
			}
			continue
		}
		if err != nil || c.Bound != row.bound || c.Low != row.low || c.High != row.high || math.Abs(c.Rate/row.rate-1) > 0.02 || (c.Limited != "") != row.limited {
			t.Errorf("%s: %s is %+v, %v; want %s %g, passed %g, failed %g, limited %t", row.name, row.steps, c, err, row.bound, row.rate, row.low, row.high, row.limited)
		}
		if row.limited && !strings.Contains(c.Why, late) {
			t.Errorf("%s: it ended because %q, want the generator's lateness", row.name, c.Why)
		}
	}
}

// No answer claims more than the probes show, however often the load generator is late. An upper bound is never below
// the server's capacity, and a sure lower bound is never above it.
func TestNoAnswerSaysMoreThanWasSeen(t *testing.T) {
	bounds := map[Bound]int{}
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 18))
		carries := math.Exp(rng.NormFloat64() * 2)
		busy := rng.Float64() // share of probes with a late load generator
		s := Search{Hint: math.Exp(rng.NormFloat64() * 2), Min: 0.05, Max: 200, Factor: 1.35, Tolerance: 0.2, MaxProbes: 1 + rng.IntN(14)}
		c, err := s.Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
			h := math.Log2(carries / rate)
			o := Outcome{Pass: h >= 0, Headroom: h, Binding: "p99 TTFT"}
			if rng.Float64() < busy { // a late generator makes bursts smaller, so a rate just above the capacity may pass; lateness may fail any rate below
				o.Limited = late
				o.Pass = rng.IntN(2) == 0 && rate < 1.1*carries
				if rate > carries && !o.Pass {
					o.Limited = "" // the probe would fail with the generator in time too
				}
			}
			return o, nil
		})
		switch {
		case errors.Is(err, ErrLimited):
			bounds["limited"]++
		case err != nil:
			t.Fatal(err)
		default:
			bounds[c.Bound]++
		}
		wrong := ""
		switch {
		case c.Low > carries:
			wrong = "passed where it cannot"
		case c.High > 0 && c.High < carries:
			wrong = "failed where it cannot"
		case c.Bound == AtLeast && c.Rate > 1.1*carries:
			wrong = "at least more than it carries"
		case c.Bound == AtLeast && c.Limited == "" && c.Rate > carries:
			wrong = "surely more than it carries"
		case c.Bound == AtMost && c.Rate < carries:
			wrong = "at most less than it carries"
		case c.Bound == AtMost && slices.ContainsFunc(c.Steps, func(s Step) bool { return s.Limited != "" && s.Rate < c.High }):
			wrong = "at most, though below it the generator decided"
		case c.Limited != "" && c.Bound != AtLeast:
			wrong = "decided by the generator, and no lower bound"
		}
		if wrong != "" {
			t.Fatalf("seed %d: %s: %+v, it carries %g", seed, wrong, c, carries)
		}
	}
	for _, b := range []Bound{Exact, AtLeast, AtMost, "limited"} {
		if bounds[b] < 30 {
			t.Errorf("only %d of the searches ended with %q: %v", bounds[b], b, bounds)
		}
	}
}

// A search measures a rate again if the load generator was late there and the rate would decide the answer.
func TestALateProbeThatDecidesIsRepeated(t *testing.T) {
	for first := range 6 {
		n, repeated := 0, map[float64]int{}
		c, err := search(3).Find(t.Context(), func(_ context.Context, rate float64) (Outcome, error) {
			h := math.Log2(6 / rate)
			o := Outcome{Pass: h >= 0, Headroom: h, Binding: "p99 TTFT"}
			repeated[rate]++
			if n++; n == first+1 && o.Pass {
				o.Limited = late
			}
			return o, nil
		})
		if err != nil || c.Bound != Exact || c.Limited != "" || math.Abs(c.Rate/6-1) > 0.2 {
			t.Errorf("late in probe %d: %+v, %v; want an exact capacity", first+1, c, err)
		}
	}
}
