package loadtest

import (
	"fmt"

	"vllmtuner/bench"
	"vllmtuner/trial/slo"
)

// notes are what a reader must know before he trusts the figures.
func (b *Bench) notes(r Result, run bench.Run) []string {
	var notes []string
	for i := range run.Samples {
		if s := &run.Samples[i]; s.Detail != "" { // only the first failures keep it
			notes = append(notes, fmt.Sprintf("first failure, %s: %s", s.Failure, s.Detail))
			break
		}
	}
	if run.Broken > 0 {
		notes = append(notes, fmt.Sprintf("%d of %d uncounted requests failed too, the first: %s", run.Broken, run.Others, run.BrokenDetail))
	}
	switch {
	case r.stopped && r.Measurement.Completed == 0:
		notes = append(notes, "ended early: p99 TTFT and TPOT count the requests that still waited; none was completed")
	case r.stopped:
		notes = append(notes, fmt.Sprintf("ended early: p99 TTFT and TPOT count the requests that still waited; of the %d that were completed they are %s and %s ms",
			r.Measurement.Completed, cell(Latency(r.Measurement, slo.TTFT, 99)), cell(Latency(r.Measurement, slo.TPOT, 99))))
	}
	if run.Stalled > 0 {
		notes = append(notes, fmt.Sprintf("the load generator itself stood still for %.1f s", run.Stalled.Seconds()))
	}
	if b.Client.Natural {
		notes = append(notes, "natural answers: another run has other work, and its figures do not compare")
	}
	if b.SLO != nil && r.Verdict == nil && r.Measurement.Void == "" {
		notes = append(notes, "no verdict: so many requests were counted that no single samples were kept")
	}
	return notes
}

// Without an SLO, lateness is too much when it is above the jitter of a machine and a visible part of the p99 TTFT.
const (
	minLag      = 10.0 // ms
	minLagShare = 0.1  // of the p99 TTFT
)

// clientLimited says why the load generator may have spoiled the p99 TTFT of a run without an SLO; "" when it did not.
func clientLimited(m bench.Measurement) string {
	for _, lag := range []struct {
		p99  float64
		does string
	}{{m.SendLag.P99, "sent its requests"}, {m.ReadLag.P99, "read the answers"}} {
		if lag.p99 > minLag && lag.p99 > minLagShare*m.TTFT.P99 {
			return fmt.Sprintf("the load generator %s %.0f ms late at p99", lag.does, lag.p99)
		}
	}
	return ""
}
