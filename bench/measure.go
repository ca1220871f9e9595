package bench

import (
	"fmt"
	"time"
)

// A Scope says what of a run is measured, and how.
type Scope struct {
	Rate    float64       // offered, requests per second; 0 for a closed loop
	Start   time.Duration // when the lead-in ends; 0 without one
	Length  time.Duration // of the window, in which the counted requests were due
	Natural bool          // answers ended where the model ended them: no length is off plan
	Rules   Rules         // those For the endpoint; "" means Rules033
	Limits  []Limit       // to count

	Sketches bool // wanted too
}

// Measure sums up a run: its Tally where it has one, else its counted samples.
func Measure(run Run, scope Scope) Measurement {
	tally := run.Tally
	if tally == nil {
		tally = newTally(scope.Rules, scope.Limits)
		for i := range run.Samples {
			tally.Add(&run.Samples[i])
		}
	}
	m := tally.Measurement(scope)
	m.Lateness, m.Series = run.Lateness, run.Series
	m.PeakChunks = tally.series(run.Series).peakChunks(scope.Start, tally.total.end)
	if sum, n := run.Series.between(scope.Start, scope.Start+scope.Length); n > 0 {
		m.WindowRequestThroughput = float64(sum.Ended) / float64(n)
		if tally.total.chunks > 0 { // of the same requests, as tokens share chunks more often the busier a server is
			m.WindowOutputThroughput = float64(sum.Chunks) / float64(n) * float64(tally.total.output) / float64(tally.total.chunks)
		}
	}
	return m
}

// ByNumber is the scope of a window that ends by number: from the first due time to the last end.
func (s Scope) ByNumber(run Run) Scope {
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

// rates divides what was done by the time that it took.
func (m *Measurement) rates(took time.Duration) {
	if took <= 0 {
		return
	}
	m.Duration = took
	seconds := took.Seconds()
	m.RequestThroughput = float64(m.Completed) / seconds
	m.OutputThroughput = float64(m.OutputTokens) / seconds
	m.TotalThroughput = float64(m.PromptTokens+m.OutputTokens) / seconds
	m.Goodput = float64(m.Good) / seconds
	m.Sessions.PerSecond = float64(m.Sessions.Completed) / seconds
}

// mostOffPlan is the share of tokens by which a run may miss its plan: beyond it the server did other work than was asked for,
// and its latencies are those of that work.
const mostOffPlan = 0.01

// void finds out whether the run measured what was planned: as many tokens as were pinned, and tokens that were streamed.
func (t *Tally) void(m *Measurement, scope Scope) {
	m.Void = t.visibility.void(m.SendLag)
	if scope.Natural || t.total.planned == 0 {
		return
	}
	m.OffPlan = float64(t.total.offPlan) / float64(t.total.planned)
	if m.OffPlan > mostOffPlan {
		m.Void = fmt.Sprintf("the answers are %.2g %% longer or shorter than was asked for, %g %% may be: "+
			"look for something between tuner and vLLM that changes max_tokens or ignore_eos", 100*m.OffPlan, 100*mostOffPlan)
	}
}
