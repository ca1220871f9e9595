package loadtest

import (
	"fmt"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
)

// A Load says which requests are sent and when, at any rate or concurrency.
type Load struct {
	Source      workload.Source // nil if a trace holds the requests
	Live        bool            // whether each request of Source begins a conversation
	Seed        uint64
	LeadIn      time.Duration
	Window      time.Duration // minimum length of the counted part of a run
	Requests    int           // minimum number of counted requests; 0 means defaultRequests, or in a closed loop ten per stream and at least 30
	MinJudged   int           // number of requests that a verdict needs; 0 without an SLO
	Arrivals    workload.Arrivals
	Rescale     bool // send N requests in exactly N/rate seconds, without lead-in and run-out, as vllm bench serve does
	NoRunOut    bool
	EmptyCaches bool // whether the prefix cache is emptied before each run; the lead-in then must not send the counted requests
}

// MaxRequests is how many requests a run may have. To send that many at 1,000 requests per second takes three hours.
const MaxRequests = 10_000_000

// CheckLength returns an error if a run at the rate would have more than MaxRequests.
func (l Load) CheckLength(rate float64) error {
	if n := rate * (l.Window + l.LeadIn).Seconds(); n > MaxRequests {
		return fmt.Errorf("%g req/s for %s are %.3g requests, and a run has at most %d; lower the rate, --seconds or --lead-in", rate, render.Took(l.Window+l.LeadIn), n, MaxRequests)
	}
	return nil
}

// defaultRequests is how many requests an open-loop run counts. The p99 of 300 requests is the fourth slowest, so up to
// three slow requests do not break a limit.
const defaultRequests = 300

// MinRequests is the minimum number of counted requests in an open-loop run.
func (l Load) MinRequests() int {
	if l.Requests > 0 {
		return l.Requests
	}
	return defaultRequests
}

// plan returns the load at a rate. The parameter draw chooses one set of random requests and arrival times.
func (l Load) plan(rate float64, draw int) workload.Plan {
	return workload.Plan{
		Source: l.Source, Seed: l.Seed, Rate: rate, Draw: draw, LeadIn: l.LeadIn, Window: l.Window, MinRequests: l.MinRequests(),
		Arrivals: l.Arrivals, Rescale: l.Rescale,
	}
}

// Planned is how long a run at a rate takes, without its run-out. The run-out is as long as the longest answers.
func (l Load) Planned(rate float64) time.Duration {
	n, window := l.plan(rate, 0).Counted()
	if n == 0 || l.Rescale {
		return window
	}
	return l.LeadIn + window
}

// Open returns an open-loop run at a rate. The parameter draw chooses one set of random requests. Runs with different
// draws share neither requests nor arrival times.
func (l Load) Open(rate float64, draw int) Run {
	plan := l.plan(rate, draw)
	r := Run{Level: trial.Level{Rate: rate}, leadIn: plan.LeadIn, schedule: l.cut(plan.Schedule())}
	if l.Rescale {
		r.leadIn = 0
	}
	r.planned, r.window = plan.Counted()
	return r
}

// Closed returns a closed-loop run. The first request of each stream is not counted, because the first requests are all
// sent at once, unlike later ones.
func (l Load) Closed(streams int) Run {
	const minimum, perStream = 30, 10
	loop := workload.Loop{Source: l.Source, LeadIn: streams, N: l.Requests}
	if l.LeadIn == 0 {
		loop.LeadIn = 0
	}
	if loop.N == 0 {
		loop.N = max(minimum, perStream*streams, l.MinJudged)
	}
	return Run{Level: trial.Level{Streams: streams}, planned: loop.N, schedule: l.cut(loop.Schedule())}
}

// Ramp returns a run whose rate rises or falls from one value to another.
func (l Load) Ramp(from, to float64, exponential bool) Run {
	ramp := workload.Ramp{Source: l.Source, Seed: l.Seed, From: from, To: to, Exponential: exponential, N: l.MinRequests(), Burstiness: l.Arrivals.Burstiness}
	r := Run{from: from, to: to, schedule: l.cut(ramp.Schedule())}
	r.planned, r.window = ramp.Counted()
	return r
}

// Replay returns a run with the recorded arrival times. If the parameter recorded is true, the trace also holds the
// requests, and they are sent in the trace's order.
func (l Load) Replay(speed float64, recorded bool) Run {
	replay := workload.Replay{Trace: l.Arrivals.Trace, Speed: speed, N: l.Requests}
	if !recorded {
		replay.Source = l.Source
	}
	r := Run{schedule: l.cut(replay.Schedule())}
	r.planned, r.window = replay.Counted()
	return r
}

// cut leaves out the run-out if NoRunOut is set. If EmptyCaches is set, it gives the lead-in other requests than the window.
func (l Load) cut(schedule workload.Schedule) workload.Schedule {
	if l.EmptyCaches && l.Source != nil {
		schedule = workload.WithColdLeadIn(schedule, l.Source)
	}
	if !l.NoRunOut {
		return schedule
	}
	return workload.WithoutRunOut(schedule)
}

// Nth returns the load of run n, counted from 0. If the source is endless, each run has different requests, so that the
// prefix cache holds none of them.
func (l Load) Nth(n int) Load {
	if l.Source != nil && l.Source.Len() == 0 && n > 0 {
		l.Source = shifted{l.Source, n * maxRunLength}
	}
	return l
}

// maxRunLength is greater than the number of requests in any run.
const maxRunLength = 1 << 30

// A shifted source skips the first requests of an endless source.
type shifted struct {
	workload.Source
	by int
}

func (s shifted) Request(stream workload.Stream, i int) *workload.Request {
	return s.Source.Request(stream, i+s.by)
}
