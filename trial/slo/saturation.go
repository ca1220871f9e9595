package slo

import (
	"fmt"
	"math"
	"time"

	"vllmtuner/bench"
)

// A clearness is when a queue is said to grow: when TTFT does, by so much, so surely, and for so long. In a queue that is served
// in order at the rate s while the rate r is offered, TTFT grows by 1 - s/r.
//
// TTFT and not the number in flight: the first counted requests follow uncounted ones, so their number rises for as long as an
// answer takes, which may be the whole window; and it also rises while a batch fills that is not full yet.
type clearness struct {
	perSecond float64       // seconds of TTFT
	errors    float64       // standard errors above zero, of eight degrees of freedom
	span      time.Duration // from the first due time to the last first token
}

// Once a second chance has a trial more: with the clearness of a whole window 3 of 200 windows of a random queue at 0.9 of what
// is served would have been ended early.
var (
	grownAtEnd = clearness{0.05, 5, 30 * time.Second}
	grownEarly = clearness{0.1, 8, time.Minute}
)

// A growth is how the queue grew through the window.
type growth struct {
	perSecond float64 // seconds of TTFT, 0 where it did not grow clearly
	rate      float64 // requests per second that were due
}

// growthOf looks at what is known until the last first token came.
func growthOf(samples []bench.Sample, least clearness) growth {
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
	ttft := bench.TrendOf(samples, last, last-begin, bench.Rules033, nil).TTFT
	if ttft.PerSecond < least.perSecond || ttft.PerSecond < least.errors*ttft.StdErr {
		return growth{}
	}
	return growth{ttft.PerSecond, float64(len(samples)-1) / (end - begin).Seconds()}
}

// headroom is ln(rate that is served / rate that is offered).
func (g growth) headroom() float64 {
	return max(-mostHeadroom, math.Log(max(1-g.perSecond, math.Exp(-mostHeadroom))))
}

func (g growth) String() string {
	return fmt.Sprintf("over-saturated: TTFT grew by %.2g s in each second of the window and the queue by %.2g requests; at this rate no latency is stable",
		g.perSecond, g.perSecond*g.rate)
}
