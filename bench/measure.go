package bench

import (
	"fmt"
	"time"
)

// A Scope says which part of a run is measured, and how.
type Scope struct {
	Rate    float64       // offered requests per second; 0 for a closed loop
	Start   time.Duration // end of the lead-in; 0 if there is no lead-in
	Length  time.Duration // length of the window; the counted requests were due in it
	Natural bool          // the model ended its answers, so any length is as planned
	Rules   Rules         // what Rules.For returns for the endpoint; "" means Rules033
	Limits  []Limit       // for each limit, the measurement counts the requests over it

	Sketches bool // include the Sketches
}

// Measure sums up a run from its Tally, or from its counted samples if the run has no Tally.
func Measure(run Run, scope Scope) Measurement {
	tally := run.Tally
	if tally == nil {
		tally = newExactTally(scope.Rules, scope.Limits)
		for i := range run.Samples {
			tally.Add(&run.Samples[i])
		}
	}
	m := tally.measurement(scope)
	m.Lateness, m.Series = run.Lateness, run.Series
	m.PeakChunks = tally.series(run.Series).peakChunks(scope.Start, tally.total.end)
	if sum, n := run.Series.between(scope.Start, scope.Start+scope.Length); n > 0 {
		m.WindowRequestThroughput = float64(sum.Ended) / float64(n)
		if tally.total.chunks > 0 { // use the tokens per chunk of this run, because a busy server puts more tokens into a chunk
			m.WindowOutputThroughput = float64(sum.Chunks) / float64(n) * float64(tally.total.output) / float64(tally.total.chunks)
		}
	}
	return m
}

// ByCount returns the scope of a window that is defined by a number of requests. Such a window lasts from the first due
// time to the last end.
func (s Scope) ByCount(run Run) Scope {
	if len(run.Samples) == 0 {
		s.Length = max(run.Elapsed-s.Start, 0)
		return s
	}
	s.Start = run.Samples[0].Due
	for i := range run.Samples {
		s.Length = max(s.Length, run.Samples[i].End-s.Start)
	}
	return s
}

// rates sets the throughputs of the measurement: the means over the given period.
func (m *Measurement) rates(period time.Duration) {
	if period <= 0 {
		return
	}
	m.Duration = period
	seconds := period.Seconds()
	m.RequestThroughput = float64(m.Completed) / seconds
	m.OutputThroughput = float64(m.OutputTokens) / seconds
	m.TotalThroughput = float64(m.PromptTokens+m.OutputTokens) / seconds
	m.Goodput = float64(m.Good) / seconds
	m.Sessions.PerSecond = float64(m.Sessions.Completed) / seconds
}

// maxOffPlan is the largest share of tokens by which the answers may differ from the plan. If they differ by more, the
// server did other work than the requests asked for, so the latencies do not apply.
const maxOffPlan = 0.01

// judgePlan sets m.Void if the run did not measure what was planned. The plan is that the server generates the pinned
// number of tokens, and streams them.
func (t *Tally) judgePlan(m *Measurement, scope Scope) {
	m.Void = t.visibility.voidReason(m.SendLag)
	if scope.Natural || t.total.planned == 0 {
		return
	}
	m.OffPlan = float64(t.total.offPlan) / float64(t.total.planned)
	if m.OffPlan > maxOffPlan {
		m.Void = fmt.Sprintf("the lengths of the answers differ by %.2g %% from the requested lengths (limit %g %%): "+
			"look for a proxy between tuner and vLLM that changes max_tokens or ignore_eos", 100*m.OffPlan, 100*maxOffPlan)
	}
}
