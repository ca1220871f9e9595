package workload

import (
	"math/rand/v2"
	"time"
)

// A clock is the Poisson process of one phase. Gaps are drawn at unit rate and divided by the rate, so that every rate
// sees the same pattern: differences between two rates are then the server's and not the draw's.
type clock struct {
	draw *rand.Rand
	rate float64
	unit float64 // unit-rate time of the last arrival
}

// next returns the time of the next arrival since the beginning of the phase.
func (c *clock) next() time.Duration {
	c.unit += c.draw.ExpFloat64()
	return time.Duration(c.unit / c.rate * float64(time.Second))
}

func (p Plan) clock(stream Stream) *clock {
	return &clock{draw: chance(p.Seed, gapDraws, stream, 0), rate: p.Rate}
}

// Counted returns how many requests are due in the window and how long the window is: it ends when both Window has
// passed and MinRequests are due. Both are zero unless Rate is positive.
func (p Plan) Counted() (n int, length time.Duration) {
	if !(p.Rate > 0) {
		return 0, 0
	}
	for c := p.clock(WindowStream); ; n++ {
		due := c.next()
		if due >= p.Window && n >= p.MinRequests {
			return n, max(length, p.Window)
		}
		length = due
	}
}

// Schedule returns the arrivals of the probe. It goes on for ever in the run-out; it is empty unless Rate is positive.
func (p Plan) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		if !(p.Rate > 0) {
			return
		}
		lead := p.clock(LeadInStream)
		for i := 0; ; i++ {
			due := lead.next()
			if due >= p.LeadIn {
				break
			}
			if !yield(Arrival{due, LeadIn, i, p.Source.Request(LeadInStream, i)}) {
				return
			}
		}
		n, length := p.Counted()
		window := p.clock(WindowStream)
		for i := range n {
			if !yield(Arrival{p.LeadIn + window.next(), Window, i, p.Source.Request(WindowStream, i)}) {
				return
			}
		}
		out := p.clock(RunOutStream)
		for i := 0; ; i++ {
			if !yield(Arrival{p.LeadIn + length + out.next(), RunOut, i, p.Source.Request(RunOutStream, i)}) {
				return
			}
		}
	}
}

// Schedule returns the arrivals of the pass; it is empty unless Rate is positive.
func (p Pass) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		if !(p.Rate > 0) {
			return
		}
		c := &clock{draw: chance(p.Seed, passDraws, p.Stream, p.First), rate: p.Rate}
		for i := range p.N {
			if !yield(Arrival{c.next(), LeadIn, i, p.Source.Request(p.Stream, p.First+i)}) {
				return
			}
		}
	}
}
