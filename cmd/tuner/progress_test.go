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

// After an accepted change of the world, or with another version of the server, earlier trials cannot be the best so far.
func TestTheIncumbentIsOfThePresentWorld(t *testing.T) {
	done := func(number int, version string, rate float64) studies.Trial {
		return studies.Trial{Number: number, State: studies.Done, Version: version, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Bound: capacity.Exact}}}
	}
	study := studies.Study{
		Trials: []studies.Trial{done(0, "1", 9), done(1, "1", 2), done(2, "1", 3)},
		Events: []studies.Event{{Kind: studies.Drift, Trial: 1, Changes: studies.Changes{{Fact: "image", Was: new("a"), Is: new("b")}}}},
	}
	best := incumbentOf(study)
	if best.rate != 3 {
		t.Errorf("the best so far has %g req/s, want 3", best.rate)
	}
	for _, c := range []struct {
		next studies.Trial
		want bool
	}{{done(3, "1", 2.5), false}, {done(4, "", 2.5), false}, {done(5, "2", 2.5), true}, {done(6, "2", 2), false}} {
		if got := best.replacedBy(c.next); got != c.want {
			t.Errorf("trial %d replaces the best so far: %t, want %t", c.next.Number, got, c.want)
		}
	}
}
