package bench

import (
	"fmt"
	"slices"
	"time"
)

// stallLimit is by how much a look may be late before this process itself is taken to have stood still: stopped, swapped out,
// or without its share of the CPU.
const stallLimit = 500 * time.Millisecond

// watch tells once a second how far the run is, and asks whether it may end early. Either may be nil.
func (f *flight) watch(tell func(Progress), stop Stop) {
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
		if tell != nil {
			tell(f.progress())
		}
		if gap > every+stallLimit { // what came meanwhile is still to be read
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

// patrol closes the connections of answers that have been silent, or have gone on, for too long, and those that have been
// idle for too long.
func (f *flight) patrol() {
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

// check closes the connection of an exchange that is overdue.
func (x *exchange) check(c *conn, now time.Duration) {
	client := &x.flight.client
	quiet := now - time.Duration(x.lastByte.Load())
	switch {
	case x.doneAt.Load() > 0 && now-time.Duration(x.doneAt.Load()) > drainTime:
		c.close(errSettled)
	case quiet >= client.IdleTimeout:
		x.overdue.CompareAndSwap(0, silent)
		c.close(fmt.Errorf("no byte came for %s", client.IdleTimeout))
	case now-x.sample.Sent >= client.RunLimit:
		x.overdue.CompareAndSwap(0, endless)
		c.close(errTooLong)
	}
}
