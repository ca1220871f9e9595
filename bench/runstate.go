package bench

import (
	"cmp"
	"context"
	"sync"
	"time"

	"vllmtuner/bench/workload"
)

// A runState is the state of one Run.
type runState struct {
	client   Client
	chat     bool
	head     []byte // beginning of every request, up to its id
	id       string // beginning of every request's id
	pool     *pool
	ctx      context.Context // context of the run; its cause says why the run ended
	start    time.Time
	finish   context.CancelCauseFunc // ends the run and withdraws all requests; only the first cause counts
	watched  bool                    // there is a Stop function, which sees pending samples
	requests sync.WaitGroup
	slots    chan time.Duration // for each free slot of a closed loop, the time when it became free; nil in an open loop

	mu      sync.Mutex
	tooLong *time.Timer // nil until all counted requests are due
	run     Run
	pending int  // counted requests and live conversations that have not ended
	runOut  bool // the first request of the run-out is due
	gauge   gauge
	gaps    int   // number of token gaps (Sample.Gaps) in all samples together
	free    []int // indexes of free places in run.Samples, whose samples have moved to the tally
}

// A departure is a request that is ready to be sent.
type departure struct {
	workload.Arrival
	wire []byte // the whole HTTP request
}

func (f *runState) now() time.Duration { return time.Since(f.start) }

// prepare composes requests ahead of their due times until the schedule or the run ends.
func (f *runState) prepare(schedule workload.Schedule, ready chan<- departure) {
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

// pace sends each request when it is due, until there are no more or the run ends.
func (f *runState) pace(ready <-chan departure) {
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
		slot, ok := f.awaitSlot(&d)
		if !ok || d.Phase == workload.RunOut && f.beginRunOut() {
			return
		}
		f.send(f.depart(d, slot))
	}
}

// A slot allows one request of a closed loop to be in flight.
type slot struct {
	freeSince time.Duration // when the slot became free
	queued    time.Duration // how long the request waited for the slot after its due time
}

// awaitSlot waits for a free slot in a closed loop. In an open loop every request gets a slot at once.
func (f *runState) awaitSlot(d *departure) (s slot, ok bool) {
	if f.slots == nil {
		d.Due = max(d.Due, 0)
		return slot{freeSince: d.Due}, true
	}
	select {
	case s.freeSince = <-f.slots:
		if d.Due != workload.Asap {
			s.queued = max(0, s.freeSince-d.Due)
		}
		return s, true
	case <-f.ctx.Done():
		return s, false
	}
}

// beginRunOut records that the run-out has begun. If all counted requests have ended, it ends the run and returns true.
func (f *runState) beginRunOut() bool {
	f.startRunLimit()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.runOut = true
	if f.pending == 0 {
		f.finish(errEnough)
	}
	return f.pending == 0
}

// startRunLimit starts the timer that ends the run if the last answers take too long.
func (f *runState) startRunLimit() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.tooLong == nil {
		f.tooLong = time.AfterFunc(f.client.RunLimit, func() { f.finish(errTooLong) })
	}
}

// extend gives a live conversation time for its next turn: the think time, and RunLimit for the answer. The caller
// holds f.mu.
func (f *runState) extend(think time.Duration) {
	if f.tooLong != nil {
		f.tooLong.Reset(think + f.client.RunLimit)
	}
}

// depart adds a request to the run.
func (f *runState) depart(d departure, s slot) *exchange {
	x := &exchange{state: f, departure: d, at: -1, sample: d.sample()}
	if d.Due == workload.Asap {
		x.sample.Due = s.freeSince // provisional; the method send sets the due time of such a request
	}
	x.sample.Queued = s.queued
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
	x.at = f.addSample(x.sample)
	return x
}

// addSample stores a sample and returns its index.
func (f *runState) addSample(s Sample) int {
	if n := len(f.free); n > 0 {
		at := f.free[n-1]
		f.free = f.free[:n-1]
		f.run.Samples[at] = s
		return at
	}
	f.run.Samples = append(f.run.Samples, s)
	return len(f.run.Samples) - 1
}

// sample returns the sample of a request before it is sent.
func (d departure) sample() Sample {
	return Sample{
		Phase: d.Phase, Index: d.Index, Due: d.Due, WantTokens: d.Request.OutputTokens,
		Conversation: d.Request.Conversation, Turn: d.Request.Turn, LastTurn: d.Request.Next == nil,
	}
}

// send sends a request on an idle connection, or on a new one if none is idle.
func (f *runState) send(x *exchange) {
	x.sample.Sent = f.now()
	if x.Due == workload.Asap {
		x.sample.SlotFree = x.sample.Sent - x.sample.Due
		x.sample.Due = x.sample.Sent // without a rate, a user begins to wait when the request is sent
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

// sendAnew sends a request on a new connection.
func (f *runState) sendAnew(x *exchange) {
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

// publish stores the sample of a request that has not ended, so that the Stop function sees the first token.
func (f *runState) publish(at int, s Sample) {
	if at < 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.run.Samples[at] = s
}

func (f *runState) addChunks(second, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.run.Series.Chunks(second, n)
}

// maxDetails is how many failures keep their text. The first few show what is wrong.
const maxDetails = 8

// record stores the sample of a request that ended or was withdrawn. The sample of a withdrawn request has no End.
func (f *runState) record(x *exchange) {
	defer f.requests.Done()
	f.pool.release()
	follows := f.follow(x)
	if f.slots != nil && !follows {
		f.slots <- cmp.Or(x.sample.End, f.now()) // a withdrawn request has no End
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
	if s.End > 0 {
		f.gauge.end(s)
	}
	if f.gauge.failed > maxDetails {
		s.Detail = ""
	}
	f.run.Samples[x.at] = *s
	f.gaps += len(s.Gaps)
	f.limitSamples(x.at)
	if follows {
		f.pending++ // the next turn is pending now
	}
	if f.pending--; f.pending == 0 && f.runOut {
		f.finish(errEnough)
	}
}

func (f *runState) noteUncounted(s *Sample) {
	if s.Failure == "" {
		return
	}
	f.run.Broken++
	if f.run.BrokenDetail == "" {
		f.run.BrokenDetail, f.run.BrokenStatus = string(s.Failure)+": "+s.Detail, s.Status
	}
}

// maxGaps is the limit on the token gaps (times between tokens) in all samples together. So many gaps take 64 MB.
const maxGaps = 8 << 20

// limitSamples moves a sample that has ended into the tally once there are too many samples to keep. If there is a Stop
// function, this method moves nothing, because the Stop function needs all samples.
func (f *runState) limitSamples(at int) {
	if f.run.Tally == nil {
		if f.watched || len(f.run.Samples) <= f.client.MaxSamples && f.gaps <= maxGaps {
			return
		}
		f.run.Tally = newTally(f.client.Rules.For(f.client.Endpoint), f.client.Limits)
		for i := range f.run.Samples {
			if f.run.Samples[i].End > 0 {
				f.moveToTally(i)
			}
		}
		return
	}
	if f.run.Samples[at].End > 0 {
		f.moveToTally(at)
	}
}

// moveToTally moves a sample into the tally.
func (f *runState) moveToTally(at int) {
	f.run.Tally.Add(&f.run.Samples[at])
	f.run.Samples[at] = Sample{}
	f.free = append(f.free, at)
}
