package workload

import (
	"time"
)

func (p Plan) clock(stream Stream) *clock {
	return &clock{gap: p.Arrivals.gaps(chance(p.Seed, gapDraws, stream.Draw(p.Draw), 0)), rate: p.Rate}
}

// rescaled returns the window's clock with a rate that makes the last arrival due at MinRequests/Rate.
func (p Plan) rescaled() *clock {
	c := p.clock(WindowStream)
	for range p.MinRequests {
		c.next()
	}
	again := p.clock(WindowStream)
	if c.unit > 0 { // otherwise all are due at once, as in vllm bench serve
		again.rate *= c.unit / float64(p.MinRequests)
	}
	return again
}

// Counted returns how many requests are due in the window and how long the window is. The window ends when Window has
// passed and MinRequests are due. Both results are zero unless Rate is positive.
func (p Plan) Counted() (n int, length time.Duration) {
	switch {
	case !(p.Rate > 0):
		return 0, 0
	case p.Rescale:
		return p.MinRequests, time.Duration(float64(p.MinRequests) / p.Rate * float64(time.Second))
	}
	for c := p.clock(WindowStream); ; n++ {
		due := c.next()
		if due >= p.Window && n >= p.MinRequests {
			return n, max(length, p.Window)
		}
		length = due
	}
}

// Schedule returns the arrivals of the probe. The run-out goes on for ever. The schedule is empty unless Rate is positive.
func (p Plan) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		n, length := p.Counted()
		switch {
		case !(p.Rate > 0):
			return
		case p.Rescale:
			p.send(yield, p.rescaled(), 0, n, Window, WindowStream)
			return
		}
		lead := p.clock(LeadInStream)
		for i := 0; ; i++ {
			due := lead.next()
			if due >= p.LeadIn {
				break
			}
			if !yield(Arrival{due, LeadIn, i, p.Source.Request(LeadInStream.Draw(p.Draw), i)}) {
				return
			}
		}
		if p.send(yield, p.clock(WindowStream), p.LeadIn, n, Window, WindowStream) {
			p.send(yield, p.clock(RunOutStream), p.LeadIn+length, forEver, RunOut, RunOutStream)
		}
	}
}

// forEver is more requests than any run sends.
const forEver = int(^uint(0) >> 1)

// send yields n requests of a stream, due after from, and reports whether the caller wants more.
func (p Plan) send(yield func(Arrival) bool, c *clock, from time.Duration, n int, phase Phase, stream Stream) bool {
	for i := range n {
		if !yield(Arrival{from + c.next(), phase, i, p.Source.Request(stream.Draw(p.Draw), i)}) {
			return false
		}
	}
	return true
}

// Schedule returns the arrivals of the pass. It is empty unless Rate is positive.
func (p Pass) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		if !(p.Rate > 0) {
			return
		}
		c := &clock{gap: Arrivals{}.gaps(chance(p.Seed, passDraws, p.Stream, p.First)), rate: p.Rate}
		for i := range p.N {
			if !yield(Arrival{c.next(), LeadIn, i, p.Source.Request(p.Stream, p.First+i)}) {
				return
			}
		}
	}
}
