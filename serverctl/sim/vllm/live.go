package vllm

import (
	"context"
	"sync"
	"time"

	"vllmtuner/serverctl/sim"
)

// A sequence is one answer that a client waits for. A request with several prompts or answers has several sequences.
type sequence struct {
	request *sim.Request
	index   int      // number of the sequence within its request
	updates *updates // one list for all sequences of the request
	group   *group

	// The times below are in seconds of the engine's clock.
	arrived   float64 // when the request came to the API server
	queued    float64 // when the sequence came to the scheduler
	scheduled float64 // when the engine scheduled the sequence for the first time
	first     float64 // end of the step that gave the first token
	last      float64 // end of the step that gave the latest token
	reported  int     // number of tokens that were put into updates so far
}

// A group is shared by the n answers to one prompt.
type group struct {
	n, left int // number of answers, and how many of them are not finished
	longest int // length of the longest finished answer, in tokens
}

// An update is the result of one step for one sequence. Its tokens are one chunk of a stream.
type update struct {
	sequence *sequence
	tokens   int
	last     bool // the sequence has all its tokens
}

// updates holds the updates of one request until its handler takes them. The engine never waits for a handler, and the
// list uses memory only for its entries.
type updates struct {
	mu    sync.Mutex
	list  []update
	ready chan struct{} // wakes the handler: the channel has an element after a call of put
}

// put appends an update.
func (u *updates) put(one update) {
	u.mu.Lock()
	u.list = append(u.list, one)
	u.mu.Unlock()
	select {
	case u.ready <- struct{}{}:
	default:
	}
}

// take returns the list, which may be empty, and begins a new list. The parameter previous is the list that the last
// call returned; take reuses the memory of that list.
func (u *updates) take(previous []update) []update {
	u.mu.Lock()
	defer u.mu.Unlock()
	list := u.list
	u.list = previous[:0]
	return list
}

// A delivery holds the updates of one step for the clients.
type delivery struct {
	at  time.Time // when the clients shall see the tokens
	end float64   // end of the step, in seconds of the engine's clock
	to  []update
}

// A live engine runs in real time: it delivers a step's tokens when a client of a real server would see them. On the
// engine's own clock a step begins when the previous step ended. So a late wake-up of this process does not slow the
// simulated GPU down.
//
// One goroutine computes the steps and hands out all tokens of a step at once. So one timer is enough for any number of
// streams.
type live struct {
	mu     sync.Mutex
	engine *sim.Engine
	began  time.Time
	now    float64 // the engine's clock, in seconds since began
	wake   chan struct{}
	open   map[*sim.Request]*sequence
	queue  []*sequence // sequences that the engine has not scheduled yet, in the order of their arrival
	frozen int         // number of freezes that have not thawed yet; while frozen is above 0, the engine stands still
	stats  *stats

	due []delivery // deliveries to come, in order; only the goroutine of the method run uses them
}

// frozenPoll is how often a frozen engine checks whether it may go on.
const frozenPoll = 10 * time.Millisecond

func newLive(e *sim.Engine) *live {
	e.Each = true
	return &live{
		engine: e, began: time.Now(), wake: make(chan struct{}, 1), open: make(map[*sim.Request]*sequence),
		stats: newStats(e.Options),
	}
}

// clock returns the time since the engine began, in seconds.
func (l *live) clock() float64 { return time.Since(l.began).Seconds() }

// submit queues the sequences of one request. Their tokens come as updates.
func (l *live) submit(sequences []*sequence) *updates {
	updates := &updates{ready: make(chan struct{}, 1)}
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.clock()
	if l.engine.Idle() {
		l.now = max(l.now, now) // l.now may be the end of a step that still runs: a GPU does one step at a time
	}
	for i, s := range sequences {
		s.index, s.updates, s.queued = i, updates, now
		l.open[s.request] = s
		l.queue = append(l.queue, s)
		l.engine.Submit(s.request)
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return updates
}

// abort drops the sequences that have not ended.
func (l *live) abort(sequences []*sequence) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range sequences {
		if _, ok := l.open[s.request]; ok {
			delete(l.open, s.request)
			l.engine.Abort(s.request)
		}
	}
}

// withEngine calls f with the engine. No step is computed in the meantime.
func (l *live) withEngine(f func(*sim.Engine)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l.engine)
}

// freeze stops the engine. Requests stay in the engine and get no tokens.
func (l *live) freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.frozen++
}

// thaw lets the engine go on. The engine does not catch up on the frozen time.
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
	var end time.Time // end of the current step
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

// step computes one step and queues its delivery. It returns when the step ends, and whether there was anything to do.
func (l *live) step() (end time.Time, busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.frozen > 0:
		return time.Now().Add(frozenPoll), true
	case l.engine.Idle():
		return time.Time{}, false
	}
	began := l.now
	then := l.engine.Step(began)
	// No progress: the first request can never fit. Wait until its client gives up.
	if then == began {
		return time.Now().Add(time.Second), true
	}
	l.now = then
	l.noteScheduled(began)
	end = l.began.Add(sim.Seconds(then))
	d := delivery{at: end.Add(sim.Seconds(l.engine.Profile.Latency.AfterStep / 1000)), end: then, to: make([]update, 0, len(l.engine.Emitted))}
	for _, r := range l.engine.Emitted {
		if s := l.open[r]; s != nil {
			d.to = append(d.to, update{s, r.Tokens - s.reported, r.Finished()})
			s.reported = r.Tokens
		}
	}
	l.due = append(l.due, d)
	return end, true
}

// noteScheduled finds the sequences that the engine scheduled for the first time in its last step. It sets their field
// scheduled to the time when that step began. It looks only at the front of the queue, because the engine takes
// sequences in the order of their arrival.
func (l *live) noteScheduled(began float64) {
	for len(l.queue) > 0 {
		s := l.queue[0]
		if l.open[s.request] != nil && s.request.Cached < 0 {
			return
		}
		s.scheduled = began
		l.queue[0] = nil
		l.queue = l.queue[1:]
	}
}

// deliver hands out the tokens that clients shall see by now.
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
		for _, u := range d.to {
			u.sequence.updates.put(u)
			if u.last {
				delete(l.open, u.sequence.request)
			}
		}
	}
}
