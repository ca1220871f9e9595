package simload

import (
	"context"
	"fmt"
	"iter"
	"math"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
)

// A load drives the engine in virtual time.
type load struct {
	engine  *sim.Engine
	prompts *prompts
	sent    uint64 // requests so far: each answer is its own
}

// Run sends the schedule and computes the engine's steps until every counted request has ended; a schedule that ends by
// itself is waited for. It leaves the engine idle.
func (l *load) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	return l.run(ctx, schedule, 0, stop)
}

// RunClosed is Run with streams requests in flight at a time: the next one leaves when the client has the last token of another.
func (l *load) RunClosed(ctx context.Context, schedule workload.Schedule, streams int, stop bench.Stop) (bench.Run, error) {
	return l.run(ctx, schedule, streams, stop)
}

func (l *load) run(ctx context.Context, schedule workload.Schedule, streams int, stop bench.Stop) (bench.Run, error) {
	next, end := iter.Pull(schedule)
	defer end()
	f := &flight{load: l, next: next, stop: stop, nextLook: 1, closed: streams > 0, places: make([]float64, streams)}
	defer l.engine.AbortAll() // as a client does by closing its connections
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
			return bench.Run{}, fmt.Errorf("simulated engine is stuck with %d running and %d waiting requests", l.engine.Running(), l.engine.Waiting())
		}
		f.now = then
		f.collect()
	}
	f.follow()
	f.run.Elapsed = seconds(f.now)
	f.run.Series.Close()
	return f.run, nil
}

// A flight is the state of one Run.
type flight struct {
	*load
	next     func() (workload.Arrival, bool)
	arrival  workload.Arrival // to be sent next
	more     bool             // arrival is valid
	stop     bench.Stop
	now      float64 // seconds
	nextLook float64
	counted  int // counted requests that have not ended
	closed   bool
	places   []float64 // of a closed loop that are free: since when, ascending
	run      bench.Run
}

func (f *flight) pull() { f.arrival, f.more = f.next() }

// due is when the next request is sent; never while a closed loop has no free place.
func (f *flight) due() float64 {
	switch {
	case !f.closed:
		return f.arrival.Due.Seconds()
	case len(f.places) == 0:
		return math.Inf(1)
	}
	return f.places[0]
}

// leave gives the place of a request in a closed loop back, as soon as its client has the end of the answer.
func (f *flight) leave() {
	if f.closed {
		f.places = append(f.places, f.now+f.engine.Profile.Latency.AfterStep/1000)
	}
}

// visible is when the scheduler sees the next arrival.
func (f *flight) visible() float64 {
	return f.due() + f.engine.Profile.Latency.BeforeScheduling/1000
}

// over reports whether all that is counted has ended, or Stop says that no more is needed.
func (f *flight) over() bool {
	if f.more && f.arrival.Phase == workload.RunOut && f.counted == 0 {
		return true
	}
	if f.stop == nil || f.now < f.nextLook {
		return false
	}
	f.nextLook = f.now + 1
	f.follow()
	f.run.Stopped = f.stop(seconds(f.now), f.run.Samples)
	return f.run.Stopped
}

// submitDue gives the engine all arrivals that its scheduler sees by now.
func (f *flight) submitDue() {
	for f.more && f.visible() <= f.now {
		a := f.arrival
		if f.closed { // a user of a closed loop begins to wait when the request is sent
			a.Due, f.places = seconds(f.places[0]), f.places[1:]
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

// refuse answers as vLLM does to a request that is longer than max-model-len: with status 400.
func (f *flight) refuse(r *sim.Request, limit int) {
	f.leave()
	f.run.Series.Ended(seconds(f.now), true)
	if r.Tag < 0 {
		f.run.Broken++
		return
	}
	s := &f.run.Samples[r.Tag]
	s.Failure, s.End = bench.Status, seconds(f.now)
	s.Detail = fmt.Sprintf("400: this model's maximum context length is %d tokens, the request has %d", limit, r.Prompt+r.Output)
}

// collect notes the tokens of the last step.
func (f *flight) collect() {
	at := seconds(f.now + f.engine.Profile.Latency.AfterStep/1000)
	f.run.Series.Chunks(int(at/time.Second), f.engine.Served)
	for _, r := range f.engine.Emitted {
		if r.Finished() {
			f.run.Series.Ended(at, false)
			f.leave()
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

// follow notes the tokens that requests in flight have by now.
func (f *flight) follow() {
	for _, r := range f.engine.InFlight() {
		if r.Tag < 0 || r.Chunks == 0 {
			continue
		}
		s := &f.run.Samples[r.Tag]
		s.Last = seconds(r.Last + f.engine.Profile.Latency.AfterStep/1000)
		s.Closed, s.Chunks = s.Last, r.Chunks
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
