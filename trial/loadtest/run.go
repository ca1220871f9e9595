package loadtest

import (
	"fmt"
	"math"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A Run is a planned run: one load for one window.
type Run struct {
	primes      bool          // the run only fills the prefix cache and is not reported
	rate        float64       // offered requests per second, or live sessions per second; 0 in a closed loop
	concurrency int           // streams of a closed loop; 0 in an open one
	ramp        bool          // from one rate to another
	from, to    float64       // requests per second of the ramp
	planned     int           // counted requests
	leadIn      time.Duration // begin of the window; unused when window is 0
	window      time.Duration // 0 when the run ends after a number of requests
	schedule    workload.Schedule
}

// String names the run, such as "2 req/s".
func (r Run) String() string {
	switch {
	case r.primes:
		return fmt.Sprintf("filling the prefix cache at %g req/s", r.rate)
	case r.concurrency > 0:
		return fmt.Sprintf("concurrency %d", r.concurrency)
	case r.ramp:
		return fmt.Sprintf("%g to %g req/s", r.from, r.to)
	case r.rate == 0:
		return "as recorded"
	}
	return fmt.Sprintf("%g req/s", r.rate)
}

// Requests is how many requests are counted.
func (r Run) Requests() int { return r.planned }

// Streams is how many requests are in flight at once. It is exact in a closed loop. In an open loop it is the requests of one second.
func (r Run) Streams() (n int, exact bool) {
	if r.concurrency > 0 {
		return r.concurrency, true
	}
	return int(math.Ceil(max(r.rate, r.from, r.to))), false
}

// level is what a sweep varies: the streams of a closed loop, or the rate.
func (r Run) level() float64 {
	if r.concurrency > 0 {
		return float64(r.concurrency)
	}
	return r.rate
}

// A Result is what one run measured.
type Result struct {
	Run
	Measurement bench.Measurement
	scope       bench.Scope
	samples     []bench.Sample // the counted requests; none where they were too many
	Verdict     *slo.Verdict   // nil without an SLO
	workload    string         // the workload and its seed
	Limited     string         // why the load generator may have spoiled the figures; "" when it did not
	notes       []string       // what else a reader must know
	took        time.Duration  // from the start to the end of the last request
	stopped     bool           // ended early, because it had already failed
}

// ResultOf is the result of a trial's probe, for its row in a table.
func ResultOf(p trial.Probe) Result {
	return Result{Run: Run{rate: p.Rate, concurrency: p.Streams}, Measurement: p.Measurement, Verdict: &p.Verdict, Limited: p.Verdict.ClientLimited}
}

// judged returns the figures of a latency with the 99th percentile that the verdict used. In a run that ended early the verdict
// counts requests that still waited, while the measurement has completed ones alone.
func (r Result) judged(limit string, s bench.Stats) bench.Stats {
	if r.stopped && r.Verdict != nil {
		for _, c := range r.Verdict.Checks {
			if c.Limit == limit && c.ValueMS > 0 {
				s.P99, s.N = c.ValueMS, max(s.N, 1)
			}
		}
	}
	return s
}

// outcome is the run as a search or a sweep sees it. Without a verdict it did not pass.
func (r Result) outcome() capacity.Outcome {
	o := capacity.Outcome{InFlight: r.Measurement.MeanInFlight, Limited: r.Limited}
	if r.Measurement.Void != "" {
		o.Limited = "the run is void"
	}
	if v := r.Verdict; v != nil {
		o.Pass, o.Headroom, o.Binding, o.Limited = trial.Passed(*v, r.Measurement), v.Headroom, v.Binding, v.ClientLimited
	}
	return o
}
