package slo

import (
	"fmt"
	"math"
	"time"

	"vllmtuner/bench"
)

// A clearGrowth has the thresholds for a queue that clearly grows: how fast TTFT must grow, how surely, and for how
// long. If requests are offered at the rate r and served in order at the lower rate s, TTFT grows by 1 - s/r seconds
// per second.
//
// The number of requests in flight is no measure of this growth. This number is counted from the first counted request
// on, so it rises for as long as an answer takes, which may be the whole window. It also rises while a batch fills.
type clearGrowth struct {
	perSecond float64       // growth of TTFT, seconds per second
	errors    float64       // how many standard errors (with eight degrees of freedom) the growth must be above zero
	span      time.Duration // time from the first due time to the last first token
}

// The thresholds for an early end are higher than the thresholds at the end of a window, because they are checked every
// second. With the same thresholds, 3 of 200 windows of a random queue at 0.9 of the served rate would have been ended
// early.
var (
	grownAtEnd = clearGrowth{0.05, 5, 30 * time.Second}
	grownEarly = clearGrowth{0.1, 8, time.Minute}
)

// A growth says how the queue grew through the window.
type growth struct {
	perSecond float64 // growth of TTFT, seconds per second; 0 if it is not clear
	rate      float64 // requests per second that were due
}

// growthOf returns the growth of TTFT up to the last first token. It returns zero if the growth is below the
// thresholds.
func growthOf(samples []bench.Sample, least clearGrowth) growth {
	if len(samples) < 2 {
		return growth{}
	}
	var last time.Duration
	for i := range samples {
		last = max(last, samples[i].First)
	}
	begin, end := samples[0].Due, samples[len(samples)-1].Due
	if last-begin < least.span || end <= begin {
		return growth{}
	}
	ttft := bench.TTFTSlope(samples, last)
	if ttft.PerSecond < least.perSecond || ttft.PerSecond < least.errors*ttft.StdErr {
		return growth{}
	}
	return growth{ttft.PerSecond, float64(len(samples)-1) / (end - begin).Seconds()}
}

// headroom returns ln(served rate / offered rate).
func (g growth) headroom() float64 {
	return max(-maxHeadroom, math.Log(max(1-g.perSecond, math.Exp(-maxHeadroom))))
}

func (g growth) String() string {
	return fmt.Sprintf("over-saturated: TTFT grew by %.2g s in each second of the window and the queue by %.2g requests; at this rate no latency is stable",
		g.perSecond, g.perSecond*g.rate)
}
