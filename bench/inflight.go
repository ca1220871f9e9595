package bench

import (
	"maps"
	"math"
	"slices"
	"time"
)

// concurrency finds the "peak concurrent requests" of vllm bench serve (calculate_metrics in vllm/benchmarks/serve.py, 0.14.1,
// 0.32 and 0.33): the most completed requests that touch the same whole second, counted from the first one's start. It is
// coarse: all that lived at any time within that second count.
//
// Which request started first is known when the others have ended too. So the first keep of them are kept as they are, and
// the rest are sums by second, in memory that grows with time only.
type concurrency struct {
	keep    int // 0 means all
	early   []stay
	origin  time.Duration // of the seconds; once changes is not nil
	changes map[int]int   // by second: requests that begin in it less those that ended in the one before
}

// A stay is when a request was in flight.
type stay struct{ start, end time.Duration }

func (c *concurrency) add(s stay) {
	if c.changes != nil {
		c.enter(s)
		return
	}
	c.early = append(c.early, s)
	if len(c.early) == c.keep {
		c.settle()
	}
}

// settle turns what was kept into sums by second.
func (c *concurrency) settle() {
	c.origin, c.changes = math.MaxInt64, make(map[int]int)
	for _, s := range c.early {
		c.origin = min(c.origin, s.start)
	}
	for _, s := range c.early {
		c.enter(s)
	}
	c.early = nil
}

func (c *concurrency) enter(s stay) {
	c.changes[second(s.start-c.origin)]++
	c.changes[second(s.end-c.origin)+1]--
}

// second is the whole second in which a time lies.
func second(t time.Duration) int { return int(math.Floor(t.Seconds())) }

// merge adds the requests of another. Where both have sums, their seconds need not begin together: those of o count for the
// nearest ones here, and the peak is off by what comes or goes within half a second.
func (c *concurrency) merge(o *concurrency) {
	if c.changes == nil && o.changes != nil {
		early := c.early
		c.early, c.origin, c.changes = nil, o.origin, make(map[int]int, len(o.changes))
		for _, s := range early {
			c.enter(s)
		}
	}
	for _, s := range o.early {
		c.add(s)
	}
	shift := int(math.Round((o.origin - c.origin).Seconds()))
	for at, change := range o.changes {
		c.changes[at+shift] += change
	}
}

// peak returns the most requests of a second.
func (c *concurrency) peak() int {
	if c.changes == nil {
		settled := concurrency{early: c.early}
		settled.settle()
		return settled.peak()
	}
	inFlight, peak := 0, 0
	for _, at := range slices.Sorted(maps.Keys(c.changes)) {
		inFlight += c.changes[at]
		peak = max(peak, inFlight)
	}
	return peak
}
