package bench

import (
	"testing"
	"time"
)

func TestARunIsSilentWithoutTokensWhileRequestsWait(t *testing.T) {
	ok, waits := Sample{First: 1, End: time.Second}, Sample{Sent: 1}
	failed := Sample{Sent: 1, End: time.Second, Failure: Status}
	second := func(inFlight, failed, chunks int) Second {
		return Second{InFlight: inFlight, Failed: failed, Chunks: chunks}
	}
	completed := func(n int, s Second) Second {
		s.Ended = n
		return s
	}
	tally := newTally("", nil)
	tally.Add(&ok)
	for _, row := range []struct {
		name string
		run  Run
		want bool
	}{
		{"all is answered", Run{Samples: []Sample{ok, ok}, Series: Series{second(1, 0, 5), second(0, 0, 0), second(0, 0, 0)}}, false},
		{"no token at all", Run{Samples: []Sample{waits}, Series: Series{second(1, 0, 0)}}, true},
		{"nothing but refusals", Run{Samples: []Sample{failed}, Series: Series{second(0, 1, 0)}}, true},
		{"tokens until the end", Run{Samples: []Sample{ok, waits}, Series: Series{second(2, 0, 5), completed(1, second(1, 0, 1))}}, false},
		{"a second of silence", Run{Samples: []Sample{ok, waits}, Series: Series{completed(1, second(2, 0, 5)), second(1, 0, 0)}}, false},
		{"only the first token of each request", Run{Samples: []Sample{{Sent: 1, First: 2}}, Series: Series{second(2, 0, 2), second(3, 0, 1)}}, true},
		{"a lead-in completed some", Run{Samples: []Sample{waits}, Series: Series{completed(3, second(2, 0, 5)), second(1, 0, 1)}}, false},
		{"silence at the end", Run{Samples: []Sample{ok, waits}, Series: Series{second(2, 0, 5), second(1, 0, 0), second(1, 0, 0)}}, true},
		{"a pause in the middle", Run{Samples: []Sample{ok, waits}, Series: Series{second(1, 0, 0), second(1, 0, 0), completed(1, second(2, 0, 5)), second(1, 0, 0)}}, false},
		{"no series, and no token", Run{Samples: []Sample{waits, failed}}, true},
		{"no series, and a token", Run{Samples: []Sample{waits, {Sent: 1, First: 1}}}, true},
		{"no series, and an answer", Run{Samples: []Sample{waits, ok}}, false},
		{"only a tally, with a completed request", Run{Tally: tally, Series: Series{second(1, 0, 0)}}, false},
		{"nothing was counted", Run{}, false},
	} {
		if is := row.run.Silent(); is != row.want {
			t.Errorf("%s: silent is %t, want %t", row.name, is, row.want)
		}
	}
}
