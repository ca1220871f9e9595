package trial

import (
	"maps"
	"testing"
	"testing/synctest"
	"time"
)

// Books of the clock book all time: what was added, and the rest as one part.
func TestBooks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const s = time.Second
		b := NewBooks(false)
		time.Sleep(10 * s)
		b.Add(Starting, 8*s)
		b.Add(Stopping, -s) // such a time is ignored
		wantSpent(t, "a rest", b.Settle(Idling), Spent{Starting: 8 * s, Idling: 2 * s})
		wantSpent(t, "nothing since", b.Settle(Idling), Spent{})
		b.Add(Windows, 5*s)
		wantSpent(t, "more added than the clock shows", b.Settle(Idling), Spent{Windows: 5 * s})
		time.Sleep(3 * s)
		b.AddAll(Spent{LeadIn: s, Windows: s})
		b.Add(Windows, s)
		wantSpent(t, "no rest", b.Settle(Idling), Spent{LeadIn: s, Windows: 2 * s})

		v := NewBooks(true)
		began := time.Now()
		time.Sleep(s)
		v.Add(Windows, 2*s)
		if took := v.Took(began); took != 0 {
			t.Errorf("in virtual time, %s passed on the clock, want 0", took)
		}
		wantSpent(t, "virtual time", v.Settle(Idling), Spent{Windows: 2 * s})
	})
}

func wantSpent(t *testing.T, what string, got, want Spent) {
	t.Helper()
	if !maps.Equal(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func TestSpentSums(t *testing.T) {
	a := Spent{Starting: 3, Windows: 5, Choosing: 7}
	wantSpent(t, "plus", a.Plus(Spent{Windows: 2, Lost: 1}), Spent{Starting: 3, Windows: 7, Lost: 1, Choosing: 7})
	wantSpent(t, "minus", a.Minus(Spent{Windows: 5, Starting: 1}), Spent{Starting: 2, Choosing: 7})
	wantSpent(t, "of nothing", Spent(nil).Plus(nil), Spent{})
	if a.Sum() != 15 || a.GPU() != 8 {
		t.Errorf("Sum = %d and GPU = %d, want 15 and 8", a.Sum(), a.GPU())
	}
	for part := range a.Plus(Spent{Lost: 1}) {
		found := false
		for _, p := range Parts {
			found = found || p == part
		}
		if !found {
			t.Errorf("Parts lacks %s", part)
		}
	}
}

// A load is divided where its phases end, however early it ends.
func TestPartsOfALoad(t *testing.T) {
	open := offer{Level: Level{Rate: 2}, leadIn: 60, window: 120}
	for _, row := range []struct {
		name             string
		offer            offer
		elapsed, drained time.Duration
		want             Spent
	}{
		{"it runs to its end", open, 200, 3, Spent{LeadIn: 60, Windows: 120, RunOut: 23}},
		{"it fails in its window", open, 100, 3, Spent{LeadIn: 60, Windows: 40, RunOut: 3}},
		{"it ends in its lead-in", open, 50, 0, Spent{LeadIn: 50}},
		{"a sweep has no lead-in", offer{Level: Level{Rate: 2}, window: 100}, 110, 0, Spent{Windows: 100, RunOut: 10}},
		{"a closed loop is all window", offer{Level: Level{Streams: 4}}, 110, 2, Spent{Windows: 110, RunOut: 2}},
	} {
		wantSpent(t, row.name, row.offer.parts(row.elapsed, row.drained), row.want)
	}
}
