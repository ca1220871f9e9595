package main

import (
	"strings"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// If no trial has met the SLO, the progress says so. It does not print a best rate of 0 req/s.
func TestGoingOnNamesNoBestWhereThereIsNone(t *testing.T) {
	measured := func(low float64) studies.Study {
		c := capacity.Capacity{Rate: 2.5, Low: low, High: 2.5, Bound: capacity.AtMost}
		if low > 0 {
			c.Bound = capacity.Exact
		}
		return studies.Study{Trials: []studies.Trial{{State: studies.Done, Result: trial.Result{Outcome: trial.Measured, Capacity: c}}}}
	}
	for _, c := range []struct {
		low  float64
		want string
	}{
		{0, "going on: 1 of 5 trials done, none has met the SLO yet\n"},
		{2, "going on: 1 of 5 trials done, best so far 2.5 req/s\n"},
	} {
		var text strings.Builder
		newProgress(&text, measured(c.low), nil, 5)
		if !strings.HasSuffix(text.String(), c.want) {
			t.Errorf("the progress is %q, want %q", &text, c.want)
		}
	}
}
