package otherengine

import (
	"context"
	"fmt"
	"iter"
	"math"
	"net/http"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// A load drives an engine in virtual time.
type load struct{ *engine }

// Run sends the requests of the schedule until every counted request has ended. It leaves the engine idle.
func (l *load) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	next, end := iter.Pull(schedule)
	defer end()
	defer l.abort()
	r := &run{engine: l.engine, next: next, stop: stop, check: 1}
	r.pull()
	for n := 0; !r.over(); n++ {
		if n%1024 == 0 && ctx.Err() != nil {
			return bench.Run{}, context.Cause(ctx)
		}
		until := l.untilEvent()
		if r.more {
			until = min(until, max(0, r.arrival.Due.Seconds()-r.now))
		}
		if math.IsInf(until, 1) {
			break
		}
		l.move(until)
		r.now += until
		r.submitDue()
		r.record(l.settle())
	}
	r.Elapsed = seconds(r.now)
	r.Series.Close()
	return r.Run, nil
}

// A run is the state of one Run.
type run struct {
	*engine
	bench.Run
	next    func() (workload.Arrival, bool)
	arrival workload.Arrival // the next arrival to be sent
	more    bool             // the field arrival holds an arrival
	stop    bench.Stop
	now     float64 // seconds
	check   float64 // time of the next call of the function stop, in seconds
	counted int     // requests of the window that have not ended
}

func (r *run) pull() { r.arrival, r.more = r.next() }

// over reports whether all counted requests have ended, or the Stop function ends the run.
func (r *run) over() bool {
	if r.more && r.arrival.Phase == workload.RunOut && r.counted == 0 {
		return true
	}
	if r.stop == nil || r.now < r.check {
		return false
	}
	r.check = r.now + 1
	r.Stopped = r.stop(seconds(r.now), r.Samples)
	return r.Stopped
}

func (r *run) submitDue() {
	for r.more && r.arrival.Due.Seconds() <= r.now+tiny {
		a := r.arrival
		r.pull()
		r.submit(a)
	}
}

func (r *run) submit(a workload.Arrival) {
	r.Series.Sent(a.Due)
	q := a.Request
	s := &sequence{prompt: float64(q.PromptTokens), answer: float64(q.OutputTokens), sample: -1}
	if !r.machine.NoCache {
		s.chunks = chunksOf(q)
	}
	tooLong := q.PromptTokens+q.OutputTokens > r.flags.maxModelLen
	switch {
	case a.Phase == workload.Window:
		s.sample = len(r.Samples)
		r.Samples = append(r.Samples, bench.Sample{
			Phase: a.Phase, Index: a.Index, Due: a.Due, Sent: a.Due, Connected: a.Due, Conversation: q.Conversation, Turn: q.Turn,
			PromptTokens: q.PromptTokens, WantTokens: q.OutputTokens,
		})
	case tooLong:
		r.Others++
		r.Broken++
	default:
		r.Others++
	}
	switch {
	case !tooLong:
		r.waiting = append(r.waiting, s)
		if s.sample >= 0 {
			r.counted++
		}
	case s.sample >= 0:
		sample := &r.Samples[s.sample]
		sample.Failure, sample.Status, sample.End = bench.Status, http.StatusBadRequest, a.Due
		sample.Detail = fmt.Sprintf("400: the request is longer than %d tokens", r.flags.maxModelLen)
	}
}

// record writes the times of first and last tokens into the samples.
func (r *run) record(first, last []*sequence) {
	at := seconds(r.now)
	for _, s := range first {
		if s.sample >= 0 {
			sample := &r.Samples[s.sample]
			sample.Opened, sample.First, sample.Last, sample.Closed, sample.Chunks = at, at, at, at, 1
		}
	}
	for _, s := range last {
		r.Series.Ended(at, false)
		if s.sample >= 0 {
			sample := &r.Samples[s.sample]
			sample.Last, sample.Closed, sample.End = at, at, at
			sample.Chunks, sample.OutputTokens = int(s.answer), int(s.answer)
			r.counted--
		}
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
