package trial

import (
	"testing"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/slo"
)

// answers is a workload whose answers all have the same length.
type answers struct{ tokens, files int }

func (a answers) Name() string { return "answers" }
func (a answers) Len() int     { return a.files }
func (a answers) Longest() int { return 0 }
func (a answers) Request(workload.Stream, int) *workload.Request {
	return &workload.Request{OutputTokens: a.tokens}
}

func TestDefaultLeadIn(t *testing.T) {
	limit := func(m slo.Metric, max time.Duration) slo.Limit { return slo.Limit{Metric: m, Percentile: 99, Max: max} }
	ttft, tpot := limit(slo.TTFT, time.Second), limit(slo.TPOT, 60*time.Millisecond)
	for _, row := range []struct {
		name   string
		limits []slo.Limit
		tokens int
		cache  Protocol
		want   time.Duration
	}{
		{"short answers", []slo.Limit{ttft, tpot}, 50, Reset, 30 * time.Second},
		{"short answers, a cache that is carried", []slo.Limit{ttft, tpot}, 50, Steady, time.Minute},
		{"answers of a minute", []slo.Limit{ttft, tpot}, 1001, Reset, 2*time.Minute + 2*time.Second},
		{"answers of a minute, a cache that is carried", []slo.Limit{ttft, tpot}, 1001, Primed, 4*time.Minute + 4*time.Second},
		{"by the limit on ITL", []slo.Limit{limit(slo.ITL, 60*time.Millisecond)}, 1001, Reset, 2 * time.Minute},
		{"by the tightest limit", []slo.Limit{ttft, limit(slo.TPOT, time.Second), tpot, limit(slo.E2E, time.Hour)}, 1001, Reset, 122 * time.Second},
		{"E2E allows no more", []slo.Limit{ttft, tpot, limit(slo.E2E, 40*time.Second)}, 1001, Reset, 80 * time.Second},
		{"E2E alone", []slo.Limit{ttft, limit(slo.E2E, 40*time.Second)}, 1001, Reset, 80 * time.Second},
		{"TTFT alone says nothing of the rest", []slo.Limit{ttft}, 1001, Reset, 30 * time.Second},
		{"no longer than five minutes", []slo.Limit{ttft, tpot}, 9000, Carried, 5 * time.Minute},
	} {
		got := DefaultLeadIn(slo.SLO{Limits: row.limits}, answers{row.tokens, 0}, row.cache)
		if got != row.want {
			t.Errorf("%s: the lead-in is %s, want %s", row.name, got, row.want)
		}
		if of := DefaultLeadIn(slo.SLO{Limits: row.limits}, answers{row.tokens, 3}, row.cache); of != got {
			t.Errorf("%s: the lead-in of a workload of three requests is %s, want %s", row.name, of, got)
		}
	}
}
