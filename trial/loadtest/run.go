package loadtest

import (
	"fmt"
	"math"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A Run is a planned run: one load for one window.
type Run struct {
	trial.Level               // rate or concurrency, both 0 in a ramp and in a replay; with live sessions the rate counts sessions
	primes      bool          // whether the run only fills the prefix cache, and is not reported
	from, to    float64       // first and last rate of a ramp, requests per second; 0 in other runs
	planned     int           // counted requests
	leadIn      time.Duration // time before the window; unused when window is 0
	window      time.Duration // length of the window; 0 if the run ends after a number of requests
	schedule    workload.Schedule
}

// String names the run, such as "2 req/s".
func (r Run) String() string {
	switch {
	case r.primes:
		return fmt.Sprintf("filling the prefix cache at %s", r.Level)
	case r.to > 0:
		return fmt.Sprintf("%g to %g req/s", r.from, r.to)
	case r.Level == trial.Level{}:
		return "as recorded"
	}
	return r.Level.String()
}

// Requests is the number of counted requests.
func (r Run) Requests() int { return r.planned }

// InFlight returns how many requests are in flight at once. In a closed loop this is exact. In an open loop it is an
// estimate: the requests of one second.
func (r Run) InFlight() (n int, exact bool) {
	if r.Streams > 0 {
		return r.Streams, true
	}
	return int(math.Ceil(max(r.Rate, r.from, r.to))), false
}

// A Result is what one run measured.
type Result struct {
	Run
	Measurement bench.Measurement
	scope       bench.Scope
	samples     []bench.Sample // the counted requests; empty if they were too many to keep
	Verdict     *slo.Verdict   // nil without an SLO, in a void run, or if no samples were kept
	Limited     string         // why the load generator may have spoiled the figures; "" when it did not
	notes       []string       // what else a reader must know
	took        time.Duration  // time from the start of the run to the end of its last request
	stopped     bool           // whether the run ended early, because it had already failed
}

// ResultOf returns the probe of a trial as a Result, for its row in a table.
func ResultOf(p trial.Probe) Result {
	return Result{Run: Run{Level: p.Level()}, Measurement: p.Measurement, Verdict: &p.Verdict, Limited: p.Verdict.ClientLimited}
}

// outcome returns the result for a search or a sweep. A run without a verdict did not pass.
func (r Result) outcome() capacity.Outcome {
	if r.Verdict != nil {
		return trial.Probe{Verdict: *r.Verdict, Measurement: r.Measurement, GPUTime: r.took}.Outcome()
	}
	o := capacity.Outcome{InFlight: r.Measurement.MeanInFlight, Limited: r.Limited}
	if r.Measurement.Void != "" {
		o.Limited = "the run is void"
	}
	return o
}

// stage returns how far the run has got, for the progress line.
func (r Run) stage(at bench.Progress) render.Stage {
	step := r.step(at)
	s := render.Stage{
		Head: r.String(), Share: float64(at.Ended) / float64(max(1, r.planned)), Step: step, Plain: fmt.Sprintf("%s  %s", r, step),
	}
	switch {
	case r.window > 0:
		length := r.leadIn + r.window
		s.Share, s.Until = at.Now.Seconds()/length.Seconds(), render.After(length-at.Now)
	case at.Ended > 0:
		s.Until = render.After(time.Duration(float64(at.Now) * float64(r.planned-at.Ended) / float64(at.Ended)))
	}
	return s
}

// step returns the phase of the run and what has been measured so far.
func (r Run) step(at bench.Progress) string {
	phase := "window"
	switch {
	case at.Counted == 0:
		phase = "lead-in"
	case at.RunOut, at.Counted >= r.planned:
		phase = "run-out"
	}
	text := fmt.Sprintf("%s %d/%d done, %d in flight", phase, at.Ended, r.planned, at.InFlight)
	if at.Failed > 0 {
		text += fmt.Sprintf(", %d failed", at.Failed)
	}
	if at.TTFT99 > 0 {
		text += fmt.Sprintf(", p99 TTFT %.0f ms", at.TTFT99)
	}
	return text
}

// notes returns what a reader must know before trusting the figures.
func (b *Bench) notes(r Result, run bench.Run) []string {
	var notes []string
	for i := range run.Samples {
		if s := &run.Samples[i]; s.Detail != "" { // only the first failures keep their detail
			notes = append(notes, fmt.Sprintf("first failure, %s: %s", s.Failure, s.Detail))
			break
		}
	}
	if run.Broken > 0 {
		notes = append(notes, fmt.Sprintf("%s failed too; first error: %s", render.Of(run.Broken, run.Others, "uncounted request"), run.BrokenDetail))
	}
	switch {
	case r.stopped && r.Measurement.Completed == 0:
		notes = append(notes, "ended early: p99 TTFT and TPOT include the requests that still waited; no request was completed")
	case r.stopped:
		notes = append(notes, fmt.Sprintf("ended early: p99 TTFT and TPOT include the requests that still waited; over the %s alone they are %s and %s ms",
			render.Count(r.Measurement.Completed, "completed request"), cell(Latency(r.Measurement, slo.TTFT, 99)), cell(Latency(r.Measurement, slo.TPOT, 99))))
	}
	if run.Stalled > 0 {
		notes = append(notes, fmt.Sprintf("the load generator itself stalled for %.1f s", run.Stalled.Seconds()))
	}
	if b.Client.Natural {
		notes = append(notes, "natural answers: each run has different work, so the figures of two runs cannot be compared")
	}
	if b.SLO != nil && r.Verdict == nil && r.Measurement.Void == "" {
		notes = append(notes, "no verdict: there were too many requests to keep the values of each one")
	}
	return notes
}

// Without an SLO, the load generator is too late if its p99 lag exceeds both of these limits. minLag is above the usual
// jitter of a machine.
const (
	minLag      = 10.0 // ms
	minLagShare = 0.1  // as a fraction of the p99 TTFT
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
