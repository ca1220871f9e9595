package capacity

import (
	"strings"
	"testing"

	"vllmtuner/render"
)

func TestTheTextOfACapacity(t *testing.T) {
	for _, row := range []struct {
		name     string
		capacity Capacity
		want     string
	}{
		{"an estimate with an interval", Capacity{Rate: 2.0594, Low: 2, Lowest: 1.806, Highest: 2.349, StdErr: 0.07, Bound: Exact}, "2.059 req/s, 95 %: 1.806 to 2.349"},
		{"a bracket without an interval", Capacity{Rate: 2, Low: 2, High: 2.1, Bound: Exact}, "2 req/s"},
		{"a lower bound", Capacity{Rate: 50, Low: 50, Bound: AtLeast}, "at least 50 req/s"},
		{"a lower bound that passed late", Capacity{Rate: 50, Low: 40, Bound: AtLeast, Limited: "late"}, "at least about 50 req/s"},
		{"a lower bound that passed in time below a late rate", Capacity{Rate: 50, Low: 50, Bound: AtLeast, Limited: "late"}, "at least 50 req/s"},
		{"a rate of ten thousand has no exponent", Capacity{Rate: 12345, Low: 12345, Bound: Exact}, "12345 req/s"},
		{"an estimate of a trial that lost the race", Capacity{Rate: 2, Lowest: 1.5, Highest: 2.5, Bound: Estimated}, "about 2 req/s, 95 %: 1.5 to 2.5"},
	} {
		if got := row.capacity.RateText("req/s", render.Rate); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

func TestReasonsWriteHighRatesWithoutAnExponent(t *testing.T) {
	c, _ := Highest([]Step{{Rate: 12345, Outcome: Outcome{Pass: true}}, {Rate: 67890, Outcome: Outcome{Binding: "p99 TTFT"}}})
	if !strings.Contains(c.Why, "67890") || strings.Contains(c.Why, "e+") {
		t.Errorf("the reason is %q, want it to name 67890", c.Why)
	}
}
