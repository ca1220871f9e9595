package workload

import (
	"math"
	"slices"
	"testing"
	"time"
)

// arrivals returns the arrivals of a schedule, with only the first n of its run-out.
func arrivals(schedule Schedule, n int) []Arrival {
	var all []Arrival
	for a := range schedule {
		if a.Phase == RunOut && a.Index == n {
			break
		}
		all = append(all, a)
	}
	return all
}

func plan(t *testing.T, rate float64) Plan {
	return Plan{
		Source: open(t, Spec{Kind: "random", InputTokens: 4, OutputTokens: 2}, 1), Seed: 9, Rate: rate,
		LeadIn: 30 * time.Second, Window: 120 * time.Second, MinRequests: 300,
	}
}

func TestAScheduleGoesThroughItsPhasesInOrder(t *testing.T) {
	p := plan(t, 4)
	n, length := p.Counted()
	all := arrivals(p.Schedule(), 50)
	counts := make(map[Phase]int)
	for i, a := range all {
		if i > 0 && (a.Due < all[i-1].Due || a.Phase < all[i-1].Phase) {
			t.Errorf("arrival %d is due before the previous one", i)
		}
		if a.Index != counts[a.Phase] {
			t.Errorf("index %d in the %s, want %d", a.Index, a.Phase, counts[a.Phase])
		}
		counts[a.Phase]++
		stream := map[Phase]Stream{LeadIn: leadInStream, Window: WindowStream, RunOut: runOutStream}[a.Phase]
		if !slices.Equal(a.Request.Tokens, p.Source.Request(stream, a.Index).Tokens) {
			t.Errorf("arrival %d of the %s is not request %d of its stream", i, a.Phase, a.Index)
		}
		inside := map[Phase]bool{LeadIn: a.Due < p.LeadIn, Window: a.Due >= p.LeadIn && a.Due <= p.LeadIn+length, RunOut: a.Due >= p.LeadIn+length}
		if !inside[a.Phase] {
			t.Errorf("the %s has an arrival at %s", a.Phase, a.Due)
		}
	}
	if counts[Window] != n || counts[RunOut] != 50 {
		t.Errorf("%d requests in the window, %d after it, want Counted() = %d and 50", counts[Window], counts[RunOut], n)
	}
}

func TestAWindowLastsUntilBothTimeAndRequestsAreEnough(t *testing.T) {
	tests := []struct {
		name string
		rate float64
	}{
		{"a slow rate needs longer than the window", 1},
		{"a fast rate needs more than the requests", 20},
	}
	for _, test := range tests {
		p := plan(t, test.rate)
		n, length := p.Counted()
		if n < p.MinRequests || length < p.Window {
			t.Errorf("%s: Counted() = %d, %s, want at least 300 and 120 s", test.name, n, length)
		}
		if n > p.MinRequests && length > p.Window {
			t.Errorf("%s: Counted() = %d, %s, but the window should have ended at the later of 300 requests and 120 s", test.name, n, length)
		}
		if rate := float64(n) / length.Seconds(); math.Abs(rate/test.rate-1) > 0.2 {
			t.Errorf("%s: %.2f requests per second, want about %g", test.name, rate, test.rate)
		}
	}
}

func TestOnlyTheSeedChangesTheWindow(t *testing.T) {
	p := plan(t, 2)
	due := func(p Plan) (times []time.Duration) {
		for _, a := range windowOf(p) {
			times = append(times, a.Due-p.LeadIn)
		}
		return times
	}
	was, longer, other := due(p), p, p
	longer.LeadIn *= 3
	if !slices.Equal(due(longer), was) {
		t.Error("a longer lead-in changes the window")
	}
	other.Seed++
	if slices.Equal(due(other), was) {
		t.Error("another seed gives the same window")
	}
}

func TestAPassIsUncountedAndEnds(t *testing.T) {
	source := open(t, Spec{Kind: "phase1"}, 1)
	pass := Pass{Source: source, Seed: 1, Stream: PrimeStream, Rate: 10, First: 40, N: 20}
	n := 0
	for a := range pass.Schedule() {
		if a.Phase != LeadIn || a.Index != n || a.Request != source.Request(PrimeStream, 40+n) {
			t.Errorf("arrival %d = %s %d, want request %d of the stream, uncounted", n, a.Phase, a.Index, 40+n)
		}
		n++
	}
	if n != 20 {
		t.Errorf("the pass has %d arrivals, want 20", n)
	}
}

func TestARateOfZeroHasNoArrivals(t *testing.T) {
	p := plan(t, 0)
	if n, length := p.Counted(); n != 0 || length != 0 {
		t.Errorf("Counted() = %d, %s, want zero", n, length)
	}
	if all := arrivals(p.Schedule(), 1); len(all) != 0 {
		t.Errorf("%d arrivals, want none", len(all))
	}
}
