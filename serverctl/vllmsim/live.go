package vllmsim

import (
	"context"
	"sync"
	"time"
)

// A token is one step's news for a request.
type token struct {
	at   time.Time // when the client is to see it
	last bool
}

// A live engine runs in real time: a step's tokens are delivered when the step would end. A step begins where the last one
// ended on the engine's own clock, so that a late wake-up of this process does not slow the simulated GPU down.
type live struct {
	mu     sync.Mutex
	engine *Engine
	began  time.Time
	now    float64 // the engine's clock, seconds since began
	wake   chan struct{}
	news   map[*Request]chan token
	frozen int // how often it was frozen and not thawed: it computes nothing, and forgets nothing
}

// frozenLook is how often a frozen engine looks whether it was thawed.
const frozenLook = 10 * time.Millisecond

func newLive(e *Engine) *live {
	e.Each = true
	return &live{engine: e, began: time.Now(), wake: make(chan struct{}, 1), news: make(map[*Request]chan token)}
}

// submit queues a request. Its tokens come through the channel, which is never blocked on and never closed.
func (l *live) submit(r *Request) <-chan token {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.engine.Idle() {
		l.now = max(l.now, time.Since(l.began).Seconds()) // the last step may end later: one GPU does one step at a time
	}
	news := make(chan token, r.Output)
	l.news[r] = news
	l.engine.Submit(r)
	select {
	case l.wake <- struct{}{}:
	default:
	}
	return news
}

// abort drops a request whose client has gone.
func (l *live) abort(r *Request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, ok := l.news[r]; ok {
		delete(l.news, r)
		l.engine.Abort(r)
	}
}

// with calls f while no step is computed.
func (l *live) with(f func(*Engine)) {
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
	l.now = max(l.now, time.Since(l.began).Seconds())
}

// run computes steps until ctx ends.
func (l *live) run(ctx context.Context) {
	for {
		end, busy := l.step()
		if !busy {
			select {
			case <-ctx.Done():
				return
			case <-l.wake:
				continue
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(end)):
		}
	}
}

// step computes one step and hands its tokens out ahead of time, each with the time at which it may be seen.
func (l *live) step() (end time.Time, busy bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.frozen > 0:
		return time.Now().Add(frozenLook), true
	case l.engine.Idle():
		return time.Time{}, false
	}
	then := l.engine.Step(l.now)
	if then == l.now { // a request that can never fit: wait for its client to give up
		return time.Now().Add(time.Second), true
	}
	l.now = then
	end = l.began.Add(seconds(then))
	seen := end.Add(seconds(l.engine.Profile.Latency.AfterStep / 1000))
	for _, r := range l.engine.Emitted {
		if news, ok := l.news[r]; ok {
			news <- token{at: seen, last: r.Finished()}
			if r.Finished() {
				delete(l.news, r)
			}
		}
	}
	return end, true
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
