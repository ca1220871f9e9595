package capacity

import (
	"slices"
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
		{"a fail below late passes is", "0.5f 1l 2L 4f", 0.5, 0, 0.5, AtMost, "p99 TTFT", nil},
		{"a late client alone says nothing", "0.5l 1l 2l 4l", 0, 0, 0, "", "", nil},
	} {
		all := said(t, row.steps)
		slices.Reverse(all) // the order does not matter
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
