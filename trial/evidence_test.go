package trial

import (
	"testing"
	"time"

	"vllmtuner/trial/slo"
)

func TestEvidenceKnowsTheLimitsOfQueues(t *testing.T) {
	plan, longRun := evenly()
	plan.Rate, plan.Window = 4, time.Second
	limits := slo.SLO{Limits: []slo.Limit{
		{Metric: slo.TTFT, Percentile: 99, Max: time.Second}, {Metric: slo.TPOT, Percentile: 95, Max: time.Second}, {Metric: slo.E2E, Percentile: 99, Max: time.Second},
	}}
	// An older tuner has stored these checks, so they do not name their metrics.
	verdict := slo.Verdict{Checks: []slo.Check{{Each: "...."}, {Each: "...."}, {Each: "...."}}}
	e := longRun.Evidence(plan.Schedule(), 4, 0, limits, verdict)
	if e == nil || len(e.Limits) != 3 || !e.Limits[0].Queue || e.Limits[1].Queue || e.Limits[2].Queue {
		t.Errorf("Evidence = %+v; want a queue for the limit on TTFT alone", e)
	}
}
