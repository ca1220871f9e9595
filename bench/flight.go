package bench

import (
	"context"
	"sync"
	"time"

	"vllmtuner/bench/workload"
)

// A flight is the state of one Run.
type flight struct {
	client   Client
	chat     bool
	head     []byte // of every request, up to its id
	id       string // begins the id of every request
	pool     *pool
	ctx      context.Context // of the run; its cause says why it ended
	start    time.Time
	finish   context.CancelCauseFunc // withdraws all requests; the first cause stands
	watched  bool                    // somebody looks at samples that have not ended
	requests sync.WaitGroup
	places   chan time.Duration // free places of a closed loop, with the time at which they were left; nil in open loop

	mu      sync.Mutex
	tooLong *time.Timer // nil until all counted requests are due
	run     Run
	pending int  // counted requests, and live conversations, that have not ended
	runOut  bool // the first request of the run-out is due
	details int  // failures whose text was kept
	gauge   gauge
	gaps    int   // times between tokens in all samples
	free    []int // places of samples that the tally has
}

// A departure is a request that is ready to leave.
type departure struct {
	workload.Arrival
	wire []byte // the whole HTTP request
}

func (f *flight) now() time.Duration { return time.Since(f.start) }

// prepare writes the requests ahead of their due times, until the schedule or the run ends.
func (f *flight) prepare(schedule workload.Schedule, ready chan<- departure) {
	defer close(ready)
	var scratch, wire []byte
	var err error
	for arrival := range schedule {
		wire, scratch, err = f.compose(arrival, scratch)
		if err != nil {
			f.finish(err)
			return
		}
		select {
		case ready <- departure{arrival, wire}:
		case <-f.ctx.Done():
			return
		}
	}
}

// pace starts each request when it is due, until the departures or the run end.
func (f *flight) pace(ready <-chan departure) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for d := range ready {
		if d.Due > 0 {
			timer.Reset(d.Due - f.now())
			select {
			case <-timer.C:
			case <-f.ctx.Done():
				return
			}
		}
		place, ok := f.place(&d)
		if !ok || d.Phase == workload.RunOut && f.enough() {
			return
		}
		f.send(f.depart(d, place))
	}
}

// A place in flight is when a request may leave.
type place struct {
	since  time.Duration // it has been free
	queued time.Duration // the request has waited for it since it was due
}

// place waits for a free place in a closed loop.
func (f *flight) place(d *departure) (p place, ok bool) {
	if f.places == nil {
		d.Due = max(d.Due, 0)
		return place{since: d.Due}, true
	}
	select {
	case p.since = <-f.places:
		if d.Due != workload.Asap {
			p.queued = max(0, p.since-d.Due)
		}
		return p, true
	case <-f.ctx.Done():
		return p, false
	}
}

// enough notes that the run-out has begun, and ends the run if all counted requests have ended.
func (f *flight) enough() bool {
	f.limit()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runOut = true
	if f.pending == 0 {
		f.finish(errEnough)
	}
	return f.pending == 0
}

// limit begins the time in which the last answers must end.
func (f *flight) limit() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tooLong == nil {
		f.tooLong = time.AfterFunc(f.client.RunLimit, func() { f.finish(errTooLong) })
	}
}

// extend gives a conversation that goes on its time: until its next turn is due, and for that turn's answer. The lock is held.
func (f *flight) extend(think time.Duration) {
	if f.tooLong != nil {
		f.tooLong.Reset(think + f.client.RunLimit)
	}
}

// depart enters a request into the run.
func (f *flight) depart(d departure, p place) *exchange {
	x := &exchange{flight: f, departure: d, at: -1, sample: d.sample()}
	if d.Due == workload.Asap {
		x.sample.Due = p.since // until it is sent
	}
	x.sample.Queued = p.queued
	x.answer = answer{chat: f.chat, itl: f.client.ITL, natural: f.client.Natural, want: d.Request.OutputTokens, keep: d.Request.Next != nil}
	f.requests.Add(1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if !x.counted() {
		f.run.Others++
		return x
	}
	f.pending++
	f.gauge.counted++
	x.at = f.slot(x.sample)
	return x
}

// slot returns a place for a sample.
func (f *flight) slot(s Sample) int {
	if n := len(f.free); n > 0 {
		at := f.free[n-1]
		f.free = f.free[:n-1]
		f.run.Samples[at] = s
		return at
	}
	f.run.Samples = append(f.run.Samples, s)
	return len(f.run.Samples) - 1
}

// sample returns the sample of a request that has not been sent.
func (d departure) sample() Sample {
	return Sample{
		Phase: d.Phase, Index: d.Index, Due: d.Due, WantTokens: d.Request.OutputTokens,
		Conversation: d.Request.Conversation, Turn: d.Request.Turn, LastTurn: d.Request.Next == nil,
	}
}

// send sends a request on an open connection, or opens one for it.
func (f *flight) send(x *exchange) {
	x.sample.Sent = f.now()
	if x.Due == workload.Asap {
		x.sample.Vacant = x.sample.Sent - x.sample.Due
		x.sample.Due = x.sample.Sent // a user of a closed loop begins to wait when the request is sent
	}
	x.sample.Connected = x.sample.Sent
	f.mu.Lock()
	f.run.Series.Sent(x.sample.Sent)
	if x.at >= 0 {
		f.run.Samples[x.at] = x.sample
	}
	f.mu.Unlock()
	x.lastByte.Store(int64(x.sample.Sent))
	if c := f.pool.take(); c != nil {
		if x.waited = true; c.begin(x) {
			return
		}
		x.waited = false
	}
	f.pool.work.Go(func() { f.sendAnew(x) })
}

// sendAnew sends a request on a connection of its own.
func (f *flight) sendAnew(x *exchange) {
	c, err := f.pool.open(f.ctx, false)
	if err != nil {
		x.unsent(err)
		return
	}
	x.sample.Connected = f.now()
	x.lastByte.Store(int64(x.sample.Connected))
	if !c.begin(x) {
		x.unsent(c.closed)
	}
}

// publish shows a sample that has not ended, so that stop sees that it was sent, and its first token.
func (f *flight) publish(at int, s Sample) {
	if at < 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.run.Samples[at] = s
}

func (f *flight) addChunks(second, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.run.Series.Chunks(second, n)
}

// mostDetails is of how many failures the text is kept: the first few tell what is wrong.
const mostDetails = 8

// arrive enters the end of a request. One that was withdrawn has no End.
func (f *flight) arrive(x *exchange) {
	defer f.requests.Done()
	f.pool.release()
	follows := f.follow(x)
	if f.places != nil && !follows {
		f.places <- f.left(x)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := &x.sample
	if s.End > 0 {
		f.run.Series.Ended(s.End, s.Failure != "")
	}
	if !x.counted() {
		f.noteUncounted(s)
		return
	}
	if s.Failure != "" {
		if f.details++; f.details > mostDetails {
			s.Detail = ""
		}
	}
	f.run.Samples[x.at] = *s
	if s.End > 0 {
		f.gauge.end(s)
	}
	f.gaps += len(s.Gaps)
	f.sum(x.at)
	if follows {
		f.pending++ // the next turn; its departure is to come
	}
	if f.pending--; f.pending == 0 && f.runOut {
		f.finish(errEnough)
	}
}

// left returns when a request left its place in a closed loop.
func (f *flight) left(x *exchange) time.Duration {
	if x.sample.End > 0 {
		return x.sample.End
	}
	return f.now()
}

func (f *flight) noteUncounted(s *Sample) {
	if s.Failure == "" {
		return
	}
	f.run.Broken++
	if f.run.BrokenDetail == "" {
		f.run.BrokenDetail = string(s.Failure) + ": " + s.Detail
	}
}

// mostGaps is how many times between tokens are kept in samples: 64 MB.
const mostGaps = 8 << 20

// sum gives a sample that has ended to the tally, once there are too many to keep. A stop function needs them all.
func (f *flight) sum(at int) {
	if f.run.Tally == nil {
		if f.watched || len(f.run.Samples) <= f.client.MaxSamples && f.gaps <= mostGaps {
			return
		}
		f.run.Tally = NewTally(f.client.Rules.For(f.client.Endpoint), f.client.Limits)
		for i := range f.run.Samples {
			if f.run.Samples[i].End > 0 {
				f.release(i)
			}
		}
		return
	}
	if f.run.Samples[at].End > 0 {
		f.release(at)
	}
}

// release moves a sample into the tally.
func (f *flight) release(at int) {
	f.run.Tally.Add(&f.run.Samples[at])
	f.run.Samples[at] = Sample{}
	f.free = append(f.free, at)
}
