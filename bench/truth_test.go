package bench_test

import (
	"testing"
	"time"
)

// TestTheClientTellsTheTruth is a short form of the table of `make bench-accuracy`, with wider bounds. A busy machine may
// delay any attempt, but a wrong client is wrong in all of them. So one good attempt of ten is enough.
func TestTheClientTellsTheTruth(t *testing.T) {
	const attempts = 10
	for _, r := range []row{
		{streams: 32, tokens: 32, tpot: 20 * time.Millisecond},
		{streams: 32, tokens: 32, tpot: 20 * time.Millisecond, open: true},
	} {
		t.Run(r.String(), func(t *testing.T) {
			t.Parallel()
			for attempt := 1; ; attempt++ {
				f := r.runOurs(t.Context(), t, 64)
				if f.Failed > 0 {
					t.Fatalf("%d requests failed, want none", f.Failed)
				}
				if f.Error.P99 <= 10 && f.Error.P50 <= 3 && f.Error.P50 >= 0 && f.TPOTError.P50 <= 0.5 && f.TPOTError.P99 <= 2 &&
					within(f.TPOT.P99, f.TrueTPOT.P99, 0.05) {
					return
				}
				t.Logf("attempt %d: %+v, want an error of TTFT of at most 3 ms at p50 and 10 at p99, of TPOT 0.5 and 2, and p99 TPOT within 5 %%", attempt, f)
				if attempt == attempts {
					t.FailNow()
				}
			}
		})
	}
}

// within reports whether value differs from want by at most the given share of want.
func within(value, want, share float64) bool {
	return value >= want*(1-share) && value <= want*(1+share)
}
