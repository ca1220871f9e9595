package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A benching is tuner bench with its flags read.
type benching struct {
	client *bench.Client
	sender trial.ClosedLoad // what sends the runs; nil means client
	info   bench.Info       // of the server, once it was asked
	load   benchLoad
	shots  []shot
	slo    *slo.SLO        // nil without
	limits []bench.Limit   // of goodput
	search *capacitySearch // nil unless the capacity is looked for
	seed   uint64

	resetCache bool      // before each run
	stderr     io.Writer // notes and progress; io.Discard when it shall be quiet
}

// A shot is one run of tuner bench.
type shot struct {
	primes      bool          // fills the prefix cache; nobody reports it
	rate        float64       // offered requests per second, live sessions per second; 0 in a closed loop
	concurrency int           // streams of a closed loop; 0 in an open one
	ramp        bool          // from one rate to another
	from, to    float64       // requests per second of the ramp
	planned     int           // counted requests
	leadIn      time.Duration // where the window begins, unless it begins with the first counted request
	window      time.Duration // 0 when it ends by number
	schedule    workload.Schedule
}

// String names the run, such as "2 req/s".
func (s shot) String() string {
	switch {
	case s.primes:
		return fmt.Sprintf("filling the prefix cache at %g req/s", s.rate)
	case s.concurrency > 0:
		return fmt.Sprintf("concurrency %d", s.concurrency)
	case s.ramp:
		return fmt.Sprintf("%g to %g req/s", s.from, s.to)
	case s.rate == 0:
		return "as recorded"
	}
	return fmt.Sprintf("%g req/s", s.rate)
}

// A benchResult is one run with what was made of it.
type benchResult struct {
	shot
	m       bench.Measurement
	scope   bench.Scope
	samples []bench.Sample // the counted requests; none where they were too many
	verdict *slo.Verdict   // nil without an SLO
	asked   string         // the workload and its seed
	limited string         // why the figures may be the load generator's own; "" when they are the server's
	notes   []string       // what else a reader must know
	took    time.Duration  // from the begin to the end of the last request
	stopped bool           // ended early, because it had failed already
}

// judged are the figures of a latency with its 99th percentile as the verdict read it. A run that was ended early has requests that were
// still waiting: the verdict counts them, and the measurement has those alone that were completed.
func (r benchResult) judged(limit string, s bench.Stats) bench.Stats {
	if r.stopped && r.verdict != nil {
		for _, c := range r.verdict.Checks {
			if c.Limit == limit && c.ValueMS > 0 {
				s.P99, s.N = c.ValueMS, max(s.N, 1)
			}
		}
	}
	return s
}

// run sends one shot and measures it. stop may be nil.
func (b *benching) run(ctx context.Context, s shot, stop bench.Stop) (benchResult, error) {
	if b.resetCache {
		if err := b.client.ResetCache(ctx); err != nil {
			return benchResult{}, fmt.Errorf("%s: %w", s, err)
		}
	}
	client := *b.client
	progress := newBenchProgress(b.stderr, s)
	client.Progress = progress.show
	sender := cmp.Or[trial.ClosedLoad](b.sender, &client)
	run, err := sender.RunClosed(ctx, s.schedule, cmp.Or(s.concurrency, client.MaxInFlight), b.byRules(stop))
	if doneErr := progress.done(); err == nil {
		err = doneErr
	}
	switch {
	case errors.Is(err, context.Canceled):
		return benchResult{}, interruptedError(fmt.Sprintf("%s was interrupted; the runs before it stand", s))
	case err != nil:
		return benchResult{}, fmt.Errorf("%s: %w", s, err)
	}
	if err := b.alive(ctx, s, run); err != nil {
		return benchResult{}, err
	}
	scope := b.scope(s, run)
	r := benchResult{shot: s, scope: scope, asked: fmt.Sprintf("%s, seed %d", b.asked(), b.seed), samples: run.Samples, m: bench.Measure(run, scope), took: run.Elapsed, stopped: run.Stopped}
	if b.slo != nil && run.Tally == nil {
		planned := s.planned
		if b.load.live { // conversations were planned, and their turns are judged
			planned = len(run.Samples)
		}
		v := b.slo.Judge(b.rules().Apply(run.Samples), planned, run.Elapsed)
		r.verdict, r.limited = &v, v.ClientLimited
	} else {
		r.limited = clientLimited(r.m)
	}
	if r.m.Void != "" { // no limit can be held against it
		r.verdict = nil
	}
	r.notes = b.notes(r, run)
	return r, nil
}

// alive asks for two tokens after a run that a search ended in silence: a server that makes none has broken no limit. Runs that nobody
// ends wait until their requests have failed.
func (b *benching) alive(ctx context.Context, s shot, run bench.Run) error {
	if !run.Silent() || b.search == nil || b.sender != nil {
		return nil
	}
	fmt.Fprintf(b.stderr, "%s: no request was completed; asking the server for two tokens\n", s)
	if _, err := b.client.Preflight(ctx); err != nil {
		return fmt.Errorf("%s: no request was completed, and then the server failed one request alone: %v; see its log", s, err)
	}
	return nil
}

// asked names the workload.
func (b *benching) asked() string {
	if b.load.source == nil {
		return b.load.arrivals.Trace.Name()
	}
	return b.load.source.Name()
}

// rules are those of the endpoint.
func (b *benching) rules() bench.Rules { return b.client.Rules.For(b.client.Endpoint) }

// byRules shows a Stop the times that count by the rules.
func (b *benching) byRules(stop bench.Stop) bench.Stop {
	if stop == nil {
		return nil
	}
	return func(now time.Duration, counted []bench.Sample) bool { return stop(now, b.rules().Apply(counted)) }
}

// scope is what of a run is measured.
func (b *benching) scope(s shot, run bench.Run) bench.Scope {
	scope := bench.Scope{
		Rate: s.rate, Start: s.leadIn, Length: s.window,
		Natural: b.client.Natural, Rules: b.rules(), Limits: b.limits,
	}
	if s.window > 0 {
		return scope
	}
	return scope.ByCount(run)
}

// notes are what a reader must know before believing the figures.
func (b *benching) notes(r benchResult, run bench.Run) []string {
	var notes []string
	for i := range run.Samples {
		if s := &run.Samples[i]; s.Detail != "" { // kept of those that failed first
			notes = append(notes, fmt.Sprintf("first failure, %s: %s", s.Failure, s.Detail))
			break
		}
	}
	if run.Broken > 0 {
		notes = append(notes, fmt.Sprintf("%d of %d uncounted requests failed too, the first: %s", run.Broken, run.Others, run.BrokenDetail))
	}
	switch {
	case r.stopped && r.m.Completed == 0:
		notes = append(notes, "ended early: p99 TTFT and TPOT count the requests that still waited; none was completed")
	case r.stopped:
		notes = append(notes, fmt.Sprintf("ended early: p99 TTFT and TPOT count the requests that still waited; of the %d that were completed they are %s and %s ms",
			r.m.Completed, cell(r.m.TTFT, p99), cell(r.m.TPOT, p99)))
	}
	if run.Stalled > 0 {
		notes = append(notes, fmt.Sprintf("the load generator itself stood still for %.1f s", run.Stalled.Seconds()))
	}
	if b.client.Natural {
		notes = append(notes, "natural answers: another run has other work, and its figures do not compare")
	}
	if b.slo != nil && r.verdict == nil && r.m.Void == "" {
		notes = append(notes, "no verdict: more requests were counted than single samples are kept of")
	}
	return notes
}

// Without limits to hold it against, lateness is too much when it is more than a jitter of the machine and a part of what
// is reported that one would see.
const (
	leastLag     = 10.0 // ms
	leastLagPart = 0.1  // of the p99 TTFT
)

// clientLimited says why the p99 TTFT of a run without an SLO may be the load generator's own.
func clientLimited(m bench.Measurement) string {
	for _, lag := range []struct {
		p99  float64
		does string
	}{{m.SendLag.P99, "sent its requests"}, {m.ReadLag.P99, "read the answers"}} {
		if lag.p99 > leastLag && lag.p99 > leastLagPart*m.TTFT.P99 {
			return fmt.Sprintf("the load generator %s %.0f ms late at p99", lag.does, lag.p99)
		}
	}
	return ""
}

// sweep sends the runs one after the other, whatever came of those before.
func (b *benching) sweep(ctx context.Context, out *benchReport) error {
	grid, next := make([]float64, len(b.shots)), 0
	for i, s := range b.shots {
		grid[i] = s.load()
	}
	steps, err := capacity.Sweep(ctx, grid, func(ctx context.Context, _ float64) (capacity.Outcome, error) {
		r, err := b.run(ctx, b.shots[next], nil)
		if err != nil {
			return capacity.Outcome{}, err
		}
		next++
		return r.outcome(), out.add(r)
	})
	if err != nil {
		return err
	}
	return out.finish(steps)
}

// load is what a sweep varies: the streams of a closed loop, or the rate.
func (s shot) load() float64 {
	if s.concurrency > 0 {
		return float64(s.concurrency)
	}
	return s.rate
}

// outcome is the run as a search or a sweep sees it. Without a verdict it is no pass.
func (r benchResult) outcome() capacity.Outcome {
	o := capacity.Outcome{InFlight: r.m.MeanInFlight, Limited: r.limited}
	if r.m.Void != "" {
		o.Limited = "the run is void"
	}
	if v := r.verdict; v != nil {
		o.Pass, o.Headroom, o.Binding, o.Limited = trial.Passed(*v, r.m), v.Headroom, v.Binding, v.ClientLimited
	}
	return o
}

// mostLooked is at how many requests of a run is looked before it: to draw millions of prompts twice would take minutes.
const mostLooked = 20_000

// requests are those of the shots, without their run-out, so that their lengths can be looked at before the first is sent.
func (b *benching) requests() iter.Seq[*workload.Request] {
	return func(yield func(*workload.Request) bool) {
		for _, s := range b.shots {
			n := 0
			for a := range s.schedule {
				if n++; a.Phase == workload.RunOut || n > mostLooked {
					break
				}
				if !yield(a.Request) {
					return
				}
			}
			if b.load.source != nil && b.load.source.Len() == 0 {
				return // other runs ask other requests of the same kind
			}
		}
	}
}
