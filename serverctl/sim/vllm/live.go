package vllm

import (
	"context"
	"sync"
	"time"

	"vllmtuner/serverctl/sim"
)

// An ask is one sequence that a client waits for: a request of several prompts or answers has several.
type ask struct {
	request *sim.Request
	index   int      // among those that are answered together
	replies *replies // of all of them
	kin     *kin     // the answers to the same prompt

	// Times are in seconds of the engine's clock.
	arrived   float64 // at the API server
	queued    float64 // at the scheduler
	scheduled float64 // for the first time
	first     float64 // end of the step of the first token
	last      float64 // end of the step of the last token so far
	computed  int     // tokens
}

// kin are the n answers to one prompt.
type kin struct {
	n, left int
	longest int // tokens of the longest answer so far
}

// A reply is news of one of the asks that are answered together.
type reply struct {
	index int
	news
}

// replies are those that the asks' handler has not taken yet. They take no more memory than there are, and the engine never
// waits for a handler.
type replies struct {
	mu   sync.Mutex
	list []reply
	some chan struct{} // of one slot, which is full while there are any
}

// put appends a reply.
func (r *replies) put(one reply) {
	r.mu.Lock()
	r.list = append(r.list, one)
	r.mu.Unlock()
	select {
	case r.some <- struct{}{}:
	default:
	}
}

// take returns all that have come, in their order, and none where a wake-up came late. The list that it returned before is used
// again.
func (r *replies) take(before []reply) []reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	came := r.list
	r.list = before[:0]
	return came
}

// news is what one step brings to one ask: its tokens of that step, which are one chunk of a stream.
type news struct {
	tokens int
	last   bool
}

// A delivery is the news of one step.
type delivery struct {
	at  time.Time // when the clients are to see it
	end float64   // of the step, in seconds of the engine's clock
	to  []addressed
}

// addressed is a piece of news with the ask that it is for.
type addressed struct {
	ask  *ask
	news news
}

// A live engine runs in real time: a step's tokens are delivered when the client would see them. A step begins where the last
// one ended on the engine's own clock, so that a late wake-up of this process does not slow the simulated GPU down.
//
// One goroutine computes the steps and hands out all tokens of a step at once, so that there is one timer whatever the number of
// streams.
type live struct {
	mu     sync.Mutex
	engine *sim.Engine
	began  time.Time
	now    float64 // the engine's clock, seconds since began
	wake   chan struct{}
	open   map[*sim.Request]*ask
	queue  []*ask // not scheduled yet, in the order in which they came
	frozen int    // how often it was frozen and not thawed: it computes nothing, and forgets nothing
	asleep int    // level of sleep; 0 is awake
	stats  *stats

	due []delivery // what is still to be seen, the next first; of the goroutine that runs
}

// frozenLook is how often an engine that computes nothing looks whether it may again.
const frozenLook = 10 * time.Millisecond

func newLive(e *sim.Engine) *live {
	e.Each = true
	return &live{
		engine: e, began: time.Now(), wake: make(chan struct{}, 1), open: make(map[*sim.Request]*ask),
		stats: newStats(e.Options.MaxModelLen),
	}
}

// clock is the engine's clock as it would be without a step's end to wait for.
func (l *live) clock() float64 { return time.Since(l.began).Seconds() }

// submit queues asks that are answered together. Their tokens come as replies.
func (l *live) submit(asks []*ask) *replies {
	replies := &replies{some: make(chan struct{}, 1)}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock()
	if l.engine.Idle() {
		l.now = max(l.now, now) // the last step may end later: one GPU does one step at a time
	}
	for i, a := range asks {
		a.index, a.replies, a.queued = i, replies, now
		l.open[a.request] = a
		l.queue = append(l.queue, a)
		l.engine.Submit(a.request)
	}
	l.rouse()
	return replies
}

// rouse wakes the goroutine that runs.
func (l *live) rouse() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// abort drops asks whose client has gone. Those that have ended are gone already.
func (l *live) abort(asks []*ask) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range asks {
		if _, ok := l.open[a.request]; ok {
			delete(l.open, a.request)
			l.engine.Abort(a.request)
		}
	}
}

// with calls f while no step is computed.
func (l *live) with(f func(*sim.Engine)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l.engine)
}

// freeze stops the engine as it is: requests stay, and nothing comes of them.
func (l *live) freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen++
}

// thaw lets the engine go on from now on; it does not catch up.
func (l *live) thaw() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen--
	l.now = max(l.now, l.clock())
}

// run computes steps and delivers their tokens until ctx ends.
func (l *live) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	var end time.Time // of the step at hand
	busy := false
	for {
		if !busy || !time.Now().Before(end) {
			end, busy = l.step()
		}
		l.deliver(time.Now())
		next := end
		if len(l.due) > 0 && (!busy || l.due[0].at.Before(next)) {
			next = l.due[0].at
		}
		timer.Stop()
		if busy || len(l.due) > 0 {
			timer.Reset(time.Until(next))
		}
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-l.wake:
		}
	}
}

// step computes one step and notes when its tokens will be seen. It returns when the step ends, and whether there is anything
// to do.
func (l *live) step() (end time.Time, busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.frozen > 0 || l.asleep > 0:
		return time.Now().Add(frozenLook), true
	case l.engine.Idle():
		return time.Time{}, false
	}
	began := l.now
	then := l.engine.Step(began)
	if then == began { // a request that can never fit: wait for its client to give up
		return time.Now().Add(time.Second), true
	}
	l.now = then
	l.noteScheduled(began)
	end = l.began.Add(seconds(then))
	d := delivery{at: end.Add(seconds(l.engine.Profile.Latency.AfterStep / 1000)), end: then, to: make([]addressed, 0, len(l.engine.Emitted))}
	for _, r := range l.engine.Emitted {
		if a := l.open[r]; a != nil {
			d.to = append(d.to, addressed{a, news{tokens: r.Tokens - a.computed, last: r.Finished()}})
			a.computed = r.Tokens
		}
	}
	l.due = append(l.due, d)
	return end, true
}

// noteScheduled finds those that left the queue in the step that began now; the scheduler takes them in their order.
func (l *live) noteScheduled(now float64) {
	for len(l.queue) > 0 {
		a := l.queue[0]
		if l.open[a.request] != nil && a.request.Cached < 0 {
			return
		}
		a.scheduled = now
		l.queue[0] = nil
		l.queue = l.queue[1:]
	}
}

// deliver hands out what clients are to see by now.
func (l *live) deliver(now time.Time) {
	if len(l.due) == 0 || l.due[0].at.After(now) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.due) > 0 && !l.due[0].at.After(now) {
		d := l.due[0]
		l.due[0] = delivery{}
		l.due = l.due[1:]
		l.stats.step(d, l.open, d.at.Sub(l.began).Seconds())
		for _, to := range d.to {
			to.ask.replies.put(reply{to.ask.index, to.news})
			if to.news.last {
				delete(l.open, to.ask.request)
			}
		}
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
