package main

import (
	"math"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/tuner/space"
)

// A benchLoad is what is asked and when, but for the rate.
type benchLoad struct {
	source   workload.Source
	live     bool // the source's requests begin conversations
	seed     uint64
	leadIn   time.Duration
	window   time.Duration // at least
	requests int           // at least; 0 means as the kind of load has it
	judged   int           // as many a verdict takes; 0 without one
	arrivals workload.Arrivals
	rescale  bool
	noRunOut bool
	cold     bool // the cache is emptied before each run: nothing of the lead-in is of use to the counted requests
}

// mostTokens is a length that no server is meant to take.
const mostTokens = 10_000_000

// mostRequests is how many a run may have: at 1,000 a second they take hours, and to draw them takes seconds.
const mostRequests = 10_000_000

// checkLength refuses a rate at which a run would have more.
func (l benchLoad) checkLength(rate float64) error {
	if n := rate * (l.window + l.leadIn).Seconds(); n > mostRequests {
		return usage("%g req/s for %s are %.3g requests, and a run has at most %d; lower the rate, --seconds or --lead-in", rate, l.window+l.leadIn, n, mostRequests)
	}
	return nil
}

// The kinds of --arrivals.
const (
	poisson  = "poisson"
	constant = "constant"
	traced   = "trace"
	replayed = "replay"
)

// newBenchLoad opens the workload and reads how it arrives.
func newBenchLoad(c *cli.Context) (benchLoad, error) {
	l := benchLoad{
		live: c.Bool("live"), seed: c.Uint64("seed"), leadIn: c.Duration("lead-in"), requests: c.Int("requests"),
		rescale: c.Bool("rescale"), noRunOut: c.Bool("no-run-out"), cold: c.Bool("reset-cache"),
	}
	const year = 366 * 24 * 3600
	switch seconds := c.Float64("seconds"); {
	case l.requests < 0 || c.IsSet("requests") && l.requests == 0:
		return l, usage("--requests %d: must be at least 1", l.requests)
	case l.requests > mostRequests:
		return l, usage("--requests %d: at most %d", l.requests, mostRequests)
	case !(seconds >= 0 && seconds < year):
		return l, usage("--seconds %g: must not be negative, nor a year and more", seconds)
	case l.leadIn < 0:
		return l, usage("--lead-in %s: must not be negative", l.leadIn)
	case c.Int("input-tokens") > mostTokens || c.Int("output-tokens") > mostTokens:
		return l, usage("--input-tokens and --output-tokens: at most %d", mostTokens)
	case l.rescale && (c.IsSet("seconds") || c.IsSet("lead-in") && l.leadIn > 0):
		return l, usage("--rescale sends --requests N alone, as vllm bench serve does; leave out --seconds and --lead-in")
	default:
		l.window = time.Duration(seconds * float64(time.Second))
	}
	var err error
	if l.arrivals, err = benchArrivals(c); err != nil {
		return l, err
	}
	l.source, err = benchSource(c)
	return l, err
}

// benchArrivals reads how the gaps between arrivals are spread.
func benchArrivals(c *cli.Context) (workload.Arrivals, error) {
	var a workload.Arrivals
	kind := c.String("arrivals")
	kinds := []string{poisson, constant, traced, replayed}
	if c.IsSet("burstiness") && kind != poisson {
		return a, usage("--burstiness is of the gamma arrivals that generalise poisson; leave it out, or --arrivals %s", kind)
	}
	switch kind {
	case poisson:
		if a.Burstiness = c.Float64("burstiness"); !(a.Burstiness > 0) {
			return a, usage("--burstiness %g: must be above 0; 1 is Poisson, larger is smoother", a.Burstiness)
		}
	case constant:
		a.Burstiness = math.Inf(1)
	case traced, replayed:
		trace, err := benchTrace(c)
		if err != nil {
			return a, err
		}
		a.Trace = trace
	default:
		return a, usage("--arrivals %s: there is no such kind; %s", kind, space.DidYouMean(kind, kinds))
	}
	if err := a.Check(); err != nil {
		return a, usage("--arrivals %s: %w", kind, err)
	}
	return a, nil
}

// leastRequests is how many counted requests an open-loop run has unless it is told: three of them may break a p99.
const leastRequests = 300

// atLeast is how many requests an open-loop run has.
func (l benchLoad) atLeast() int {
	if l.requests > 0 {
		return l.requests
	}
	return leastRequests
}

// plan is the load at a rate. Another draw asks other requests at other times.
func (l benchLoad) plan(rate float64, draw int) workload.Plan {
	return workload.Plan{
		Source: l.source, Seed: l.seed, Rate: rate, Draw: draw, LeadIn: l.leadIn, Window: l.window, MinRequests: l.atLeast(),
		Arrivals: l.arrivals, Rescale: l.rescale,
	}
}

// open is a run at a rate, of draw 0.
func (l benchLoad) open(rate float64) shot { return l.drawn(rate, 0) }

// drawn is a run at a rate, of another draw than other runs.
func (l benchLoad) drawn(rate float64, draw int) shot {
	plan := l.plan(rate, draw)
	s := shot{rate: rate, leadIn: plan.LeadIn, schedule: l.cut(plan.Schedule())}
	if l.rescale {
		s.leadIn = 0
	}
	s.planned, s.window = plan.Counted()
	return s
}

// closed is a run in a closed loop. The first request of each stream is not counted: all of them leave at once, as they never
// do again.
func (l benchLoad) closed(streams int) shot {
	const least, each = 30, 10
	loop := workload.Loop{Source: l.source, LeadIn: streams, N: l.requests}
	if l.leadIn == 0 {
		loop.LeadIn = 0
	}
	if loop.N == 0 {
		loop.N = max(least, each*streams, l.judged)
	}
	return shot{concurrency: streams, planned: loop.N, schedule: l.cut(loop.Schedule())}
}

// ramp is a run whose rate rises or falls.
func (l benchLoad) ramp(from, to float64, exponential bool) shot {
	r := workload.Ramp{Source: l.source, Seed: l.seed, From: from, To: to, Exponential: exponential, N: l.atLeast(), Burstiness: l.arrivals.Burstiness}
	s := shot{ramp: true, from: from, to: to, schedule: l.cut(r.Schedule())}
	s.planned, s.window = r.Counted()
	return s
}

// replay is a run at the recorded times. A file that says what was asked is asked so, in its order.
func (l benchLoad) replay(speed float64, own bool) shot {
	r := workload.Replay{Trace: l.arrivals.Trace, Speed: speed, N: l.requests}
	if !own {
		r.Source = l.source
	}
	s := shot{schedule: l.cut(r.Schedule())}
	s.planned, s.window = r.Counted()
	return s
}

// cut leaves the run-out out, where that is asked for, and keeps what the lead-in leaves in a cold cache from the counted requests.
func (l benchLoad) cut(schedule workload.Schedule) workload.Schedule {
	if l.cold && l.source != nil {
		schedule = workload.WithColdLeadIn(schedule, l.source)
	}
	if !l.noRunOut {
		return schedule
	}
	return workload.WithoutRunOut(schedule)
}
