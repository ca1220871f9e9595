package bench

import (
	"fmt"
	"slices"
	"time"

	"vllmtuner/render"
)

// stallLimit is how late the tick of each second may be. If a tick is later, this process itself did not run: it was
// suspended, swapped out or out of CPU time.
const stallLimit = 500 * time.Millisecond

// watch passes the progress of the run to report once a second, and ends the run when stop returns true. Both functions
// may be nil.
func (f *runState) watch(report func(Progress), stop Stop) {
	const every = time.Second
	tick := time.NewTicker(every)
	defer tick.Stop()
	last := f.now()
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		gap := f.now() - last
		last += gap
		if report != nil {
			report(f.progress())
		}
		if gap > every+stallLimit { // the answers that came during the stall have not been read yet, so do not call stop now
			f.mu.Lock()
			f.run.Stalled = max(f.run.Stalled, gap-every)
			f.mu.Unlock()
			continue
		}
		if stop == nil {
			continue
		}
		f.mu.Lock()
		counted := slices.Clone(f.run.Samples)
		f.mu.Unlock()
		if stop(f.now(), counted) {
			f.finish(errStopped)
			return
		}
	}
}

// closeOverdue closes a connection if its answer is silent or goes on for too long, or if the connection itself is idle
// for too long.
func (f *runState) closeOverdue() {
	tick := time.NewTicker(min(time.Second, max(time.Millisecond, f.client.IdleTimeout/8)))
	defer tick.Stop()
	for {
		select {
		case <-f.ctx.Done():
			return
		case <-tick.C:
		}
		now := f.now()
		for _, c := range f.pool.snapshot() {
			if x := c.current(); x != nil {
				x.check(c, now)
			}
		}
		f.pool.retire()
	}
}

// check closes the connection of an exchange that has taken too long.
func (x *exchange) check(c *conn, now time.Duration) {
	client := &x.state.client
	quiet := now - time.Duration(x.lastByte.Load())
	switch {
	case x.doneAt.Load() > 0 && now-time.Duration(x.doneAt.Load()) > drainTime:
		c.close(errAnswerOver)
	case quiet >= client.IdleTimeout:
		x.overdue.CompareAndSwap(0, silent)
		c.close(fmt.Errorf("no byte came for %s", render.Took(client.IdleTimeout)))
	case now-x.sample.Sent >= client.RunLimit:
		x.overdue.CompareAndSwap(0, endless)
		c.close(errTooLong)
	}
}
