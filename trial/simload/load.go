package simload

import (
	"context"
	"fmt"
	"iter"
	"math"
	"net/http"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
)

// A load drives the engine in virtual time.
type load struct {
	engine  *sim.Engine
	prompts *prompts
	sent    uint64 // number of requests so far; this number makes each answer unique
}

// Run sends the schedule and computes the engine's steps until every counted request has ended. If the schedule has no
// run-out, it waits for all requests. It leaves the engine idle.
func (l *load) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	return l.RunClosed(ctx, schedule, 0, stop)
}

// RunClosed is like Run with a fixed number of streams. A stream sends its next request when its client has the last
// token of the previous answer. With 0 streams the loop is open, as in Run.
func (l *load) RunClosed(ctx context.Context, schedule workload.Schedule, streams int, stop bench.Stop) (bench.Run, error) {
	next, end := iter.Pull(schedule)
	defer end()
	f := &loadRun{load: l, next: next, stop: stop, nextCheck: 1, closed: streams > 0, free: make([]float64, streams)}
	defer l.engine.AbortAll() // a real client does this by closing its connections
	f.pull()
	for steps := 0; !f.over(); steps++ {
		if steps%1024 == 0 && ctx.Err() != nil {
			return bench.Run{}, context.Cause(ctx)
		}
		f.submitDue()
		if l.engine.Idle() {
			if !f.more {
				break
			}
			f.now = f.visible()
			continue
		}
		then := l.engine.Step(f.now)
		if then == f.now {
			return bench.Run{}, fmt.Errorf("the simulated engine is stuck with %d running and %d waiting requests", l.engine.Running(), l.engine.Waiting())
		}
		f.now = then
		f.collect()
	}
	f.update()
	f.run.Elapsed = sim.Seconds(f.now)
	f.run.Series.Close()
	return f.run, nil
}

// A loadRun is the state of one Run.
type loadRun struct {
	*load
	next      func() (workload.Arrival, bool)
	arrival   workload.Arrival // the next arrival to be sent
	more      bool             // the field arrival holds an arrival
	stop      bench.Stop
	now       float64 // seconds
	nextCheck float64
	counted   int // requests of the window that have not ended
	closed    bool
	free      []float64 // closed loop: when each idle stream became idle, ascending
	run       bench.Run
}

func (f *loadRun) pull() { f.arrival, f.more = f.next() }

// due returns when the next request is sent, in seconds. It returns +Inf while a closed loop has no idle stream.
func (f *loadRun) due() float64 {
	switch {
	case !f.closed:
		return f.arrival.Due.Seconds()
	case len(f.free) == 0:
		return math.Inf(1)
	}
	return f.free[0]
}

// freeStream makes the stream of a closed loop idle again, at the time when its client has the end of the answer.
func (f *loadRun) freeStream() {
	if f.closed {
		f.free = append(f.free, f.now+f.engine.Profile.Latency.AfterStep/1000)
	}
}

// visible returns when the engine's scheduler sees the next arrival, in seconds.
func (f *loadRun) visible() float64 {
	return f.due() + f.engine.Profile.Latency.BeforeScheduling/1000
}

// over reports whether all counted requests have ended, or the Stop function ends the run.
func (f *loadRun) over() bool {
	if f.more && f.arrival.Phase == workload.RunOut && f.counted == 0 {
		return true
	}
	if f.stop == nil || f.now < f.nextCheck {
		return false
	}
	f.nextCheck = f.now + 1
	f.update()
	f.run.Stopped = f.stop(sim.Seconds(f.now), f.run.Samples)
	return f.run.Stopped
}

// submitDue gives the engine all arrivals that its scheduler can see at the time f.now.
func (f *loadRun) submitDue() {
	for f.more && f.visible() <= f.now {
		a := f.arrival
		if f.closed { // a request is due when its stream became idle
			a.Due, f.free = sim.Seconds(f.free[0]), f.free[1:]
		}
		f.pull()
		p := f.prompts.of(a.Request)
		f.sent++
		f.run.Series.Sent(a.Due)
		r := &sim.Request{
			Prompt: p.tokens, Output: a.Request.OutputTokens, Hashes: p.blocks,
			Salt: f.sent, Tag: -1,
		}
		if a.Phase == workload.Window {
			r.Tag = len(f.run.Samples)
			f.run.Samples = append(f.run.Samples, bench.Sample{
				Phase: a.Phase, Index: a.Index, Due: a.Due, Sent: a.Due, Connected: a.Due, Conversation: a.Request.Conversation, Turn: a.Request.Turn, PromptTokens: p.tokens, WantTokens: r.Output,
			})
		} else {
			f.run.Others++
		}
		if limit := f.engine.Options.MaxModelLen; r.Prompt+r.Output > limit {
			f.refuse(r, limit)
			continue
		}
		if r.Tag >= 0 {
			f.counted++
		}
		f.engine.Submit(r)
	}
}

// refuse answers a request that is longer than max-model-len with status 400, as vLLM does.
func (f *loadRun) refuse(r *sim.Request, limit int) {
	f.freeStream()
	f.run.Series.Ended(sim.Seconds(f.now), true)
	if r.Tag < 0 {
		f.run.Broken++
		return
	}
	s := &f.run.Samples[r.Tag]
	s.Failure, s.Status, s.End = bench.Status, http.StatusBadRequest, sim.Seconds(f.now)
	s.Detail = fmt.Sprintf("400: this model's maximum context length is %d tokens, the request has %d", limit, r.Prompt+r.Output)
}

// collect records the tokens of the last step.
func (f *loadRun) collect() {
	at := sim.Seconds(f.now + f.engine.Profile.Latency.AfterStep/1000)
	f.run.Series.Chunks(int(at/time.Second), f.engine.Served)
	for _, r := range f.engine.Emitted {
		if r.Finished() {
			f.run.Series.Ended(at, false)
			f.freeStream()
		}
		if r.Tag < 0 {
			continue
		}
		s := &f.run.Samples[r.Tag]
		if r.Chunks == 1 {
			s.Opened, s.First, s.CachedTokens = at, at, r.Cached
		} else if f.engine.Each {
			s.Gaps = append(s.Gaps, at-s.Last)
		}
		s.Last, s.Closed = at, at
		s.Chunks = r.Chunks
		if r.Finished() {
			s.End, s.OutputTokens = at, r.Tokens
			f.counted--
		}
	}
}

// update records the tokens that each unfinished request has so far.
func (f *loadRun) update() {
	for _, r := range f.engine.InFlight() {
		if r.Tag < 0 || r.Chunks == 0 {
			continue
		}
		s := &f.run.Samples[r.Tag]
		s.Last = sim.Seconds(r.Last + f.engine.Profile.Latency.AfterStep/1000)
		s.Closed, s.Chunks = s.Last, r.Chunks
	}
}
