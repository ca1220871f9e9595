package capacity

import (
	"slices"
	"strings"
	"testing"
)

// steps parses outcomes: p passed, f failed, l failed because of a late load generator, L passed with a late load generator.
func steps(t *testing.T, loads []float64, letters string) []Step {
	t.Helper()
	var all []Step
	for i, load := range loads {
		s := Step{Rate: load, Outcome: Outcome{Pass: letters[i] == 'p' || letters[i] == 'L', Binding: "p99 TPOT", InFlight: 10 * load}}
		if letters[i] == 'f' {
			s.Binding = "p99 TTFT"
		}
		if letters[i] == 'l' || letters[i] == 'L' {
			s.Limited = "the load generator was late"
		}
		all = append(all, s)
	}
	return all
}

func TestHighestReadsAGrid(t *testing.T) {
	loads := []float64{0.5, 1, 2, 4}
	for _, row := range []struct {
		name, letters   string
		rate, low, high float64
		bound           Bound
		binding         string
		below           []float64
	}{
		{"the last pass before the fails", "ppff", 1, 1, 2, Exact, "p99 TTFT", nil},
		{"all pass", "pppp", 4, 4, 0, AtLeast, "p99 TPOT", nil},
		{"none passes", "ffff", 0.5, 0, 0.5, AtMost, "p99 TTFT", nil},
		{"a fail below a pass", "pfpf", 2, 2, 4, Exact, "p99 TTFT", []float64{1}},
		{"fails below the last pass", "ffpp", 4, 4, 0, AtLeast, "p99 TPOT", []float64{0.5, 1}},
		{"a late client is no fail", "ppll", 1, 1, 0, AtLeast, "p99 TPOT", nil},
		{"a late client is no pass", "ppLf", 1, 1, 4, AtLeast, "p99 TPOT", nil},
		{"a late client below a pass", "Lppf", 2, 2, 4, Exact, "p99 TTFT", nil},
		{"a fail above late passes is not the lowest load", "lLff", 0, 0, 2, "", "", nil},
		{"a fail below late passes is", "flLf", 0.5, 0, 0.5, AtMost, "p99 TTFT", nil},
		{"a late client alone says nothing", "llll", 0, 0, 0, "", "", nil},
	} {
		all := steps(t, loads, row.letters)
		slices.Reverse(all) // the order does not matter
		c, below := Highest(all)
		if c.Rate != row.rate || c.Low != row.low || c.High != row.high || c.Bound != row.bound || c.Binding != row.binding || !slices.Equal(below, row.below) {
			t.Errorf("%s: Highest(%s) = %+v, below %v; want rate %g, low %g, high %g, %q by %q, below %v", row.name, row.letters, c, below, row.rate, row.low, row.high, row.bound, row.binding, row.below)
		}
		if c.Probes != 4 || c.Why == "" || strings.ContainsAny(row.letters, "lL") != strings.Contains(c.Why, "generator was late") {
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
