package trial

import (
	"math"
	"testing"
	"time"

	"vllmtuner/bench/workload"
)

// Cached predicts the share of prompt tokens that a server with its own prefix cache then finds.
func TestTheShareOfCachedPromptsIsKnownBeforehand(t *testing.T) {
	for _, row := range []struct {
		protocol Protocol
		source   sharers
	}{{Reset, 0}, {Reset, 96}, {Steady, 0}, {Primed, 96}} {
		plan := workload.Plan{Source: row.source, Seed: 1, Rate: 4, LeadIn: 10 * time.Second, Window: 20 * time.Second, MinRequests: 100}
		e := &teller{cache: make(map[uint64]bool)}
		schedule := plan.Schedule()
		if row.protocol == Reset {
			schedule = onlyWindow(schedule)
		} else {
			pass := workload.Pass{Source: row.source, Stream: workload.PrimeStream, Rate: 1, N: 96}
			if _, err := e.Run(t.Context(), pass.Schedule(), nil); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := e.Run(t.Context(), schedule, nil); err != nil {
			t.Fatal(err)
		}
		want := e.windows[0].found / e.windows[0].asked
		if is := Cached(plan, row.protocol); math.Abs(is-want) > 1e-9 {
			t.Errorf("%s, %s (%d): predicted %.4f of the prompts in the cache, want %.4f", row.protocol, row.source.Name(), row.source, is, want)
		}
	}
}
