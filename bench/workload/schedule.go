package workload

import (
	"time"
)

func (p Plan) clock(stream Stream) *clock {
	return &clock{gap: p.Arrivals.gaps(chance(p.Seed, gapDraws, stream.Draw(p.Draw), 0)), rate: p.Rate}
}

// rescaled returns the window's clock with a rate that makes the last arrival due at MinRequests/Rate seconds.
func (p Plan) rescaled() *clock {
	c := p.clock(WindowStream)
	for range p.MinRequests {
		c.next()
	}
	again := p.clock(WindowStream)
	if c.unit > 0 { // otherwise all gaps are zero and all requests are due at once, as in vllm bench serve
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
			send(yield, p.Source, part{Window, WindowStream.Draw(p.Draw), 0, n, p.rescaled().dueTimes(0)})
			return
		}
		lead := 0
		for c := p.clock(leadInStream); c.next() < p.LeadIn; {
			lead++
		}
		send(yield, p.Source,
			part{LeadIn, leadInStream.Draw(p.Draw), 0, lead, p.clock(leadInStream).dueTimes(0)},
			part{Window, WindowStream.Draw(p.Draw), 0, n, p.clock(WindowStream).dueTimes(p.LeadIn)},
			part{RunOut, runOutStream.Draw(p.Draw), 0, forEver, p.clock(runOutStream).dueTimes(p.LeadIn + length)})
	}
}

// forEver is a number of requests that no run reaches.
const forEver = int(^uint(0) >> 1)

// A part is a part of a schedule: n requests of a stream in one phase.
type part struct {
	phase  Phase
	stream Stream
	first  int // index of the first request in its stream
	n      int
	due    func() time.Duration // returns the due time of the next request
}

// send passes the requests of the parts to the function yield, one part after the other.
func send(yield func(Arrival) bool, source Source, parts ...part) {
	for _, p := range parts {
		for i := range p.n {
			if !yield(Arrival{p.due(), p.phase, i, source.Request(p.stream, p.first+i)}) {
				return
			}
		}
	}
}

// Schedule returns the arrivals of the pass. It is empty unless Rate is positive.
func (p Pass) Schedule() Schedule {
	return func(yield func(Arrival) bool) {
		if p.Rate > 0 {
			c := &clock{gap: Arrivals{}.gaps(chance(p.Seed, passDraws, p.Stream, p.First)), rate: p.Rate}
			send(yield, p.Source, part{LeadIn, p.Stream, p.First, p.N, c.dueTimes(0)})
		}
	}
}
