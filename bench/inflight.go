package bench

import (
	"maps"
	"math"
	"slices"
	"time"
)

// concurrency computes the "peak concurrent requests" of vllm bench serve (calculate_metrics in
// vllm/benchmarks/serve.py, 0.14.1, 0.32 and 0.33). vLLM cuts the run into whole seconds, from the start of its first
// request. The peak is the largest number of completed requests that were in flight in the same second. It is coarse: a
// request counts in each second in which it was in flight for any time.
//
// Requests are added when they end, and the request that started first may end last. So the start of the first second
// is not known at once. Therefore this type first keeps the intervals of requests. When it has enough of them, it keeps
// only sums by second. Its memory then grows with time, not with requests.
type concurrency struct {
	keep    int // how many intervals are kept before they are turned into sums; 0 means all
	early   []interval
	origin  time.Duration // start of second 0; valid once changes is not nil
	changes map[int]int   // for each second: the number of requests that start in it, minus the number that end in the second before
}

// An interval is the period in which a request was in flight.
type interval struct{ start, end time.Duration }

func (c *concurrency) add(s interval) {
	if c.changes != nil {
		c.enter(s)
		return
	}
	c.early = append(c.early, s)
	if len(c.early) == c.keep {
		c.sumEarly()
	}
}

// sumEarly turns the kept intervals into sums by second.
func (c *concurrency) sumEarly() {
	c.origin, c.changes = math.MaxInt64, make(map[int]int)
	for _, s := range c.early {
		c.origin = min(c.origin, s.start)
	}
	for _, s := range c.early {
		c.enter(s)
	}
	c.early = nil
}

func (c *concurrency) enter(s interval) {
	c.changes[second(s.start-c.origin)]++
	c.changes[second(s.end-c.origin)+1]--
}

// second returns the whole second in which a time lies.
func second(t time.Duration) int { return int(math.Floor(t.Seconds())) }

// peak returns the largest number of requests in flight in one second.
func (c *concurrency) peak() int {
	if c.changes == nil {
		summed := concurrency{early: c.early}
		summed.sumEarly()
		return summed.peak()
	}
	inFlight, peak := 0, 0
	for _, at := range slices.Sorted(maps.Keys(c.changes)) {
		inFlight += c.changes[at]
		peak = max(peak, inFlight)
	}
	return peak
}
