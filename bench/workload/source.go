package workload

import (
	"slices"
	"sync"
)

// A finite is a source with a fixed population that each stream passes through in its own order, again and again.
type finite struct {
	name     string
	seed     uint64
	requests []Request // at least one
	longest  int

	mu     sync.Mutex
	orders map[Stream][]int
}

func newFinite(name string, seed uint64, requests []Request) *finite {
	return &finite{name: name, seed: seed, requests: requests, longest: longest(requests), orders: make(map[Stream][]int)}
}

func (f *finite) Name() string { return f.name }

func (f *finite) Len() int { return len(f.requests) }

func (f *finite) Longest() int { return f.longest }

func (f *finite) Request(stream Stream, i int) *Request {
	return &f.requests[f.order(stream)[i%len(f.requests)]]
}

// order returns the stream's permutation of the population.
func (f *finite) order(stream Stream) []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	order := f.orders[stream]
	if order == nil {
		order = chance(f.seed, shuffleDraws, stream, 0).Perm(len(f.requests))
		f.orders[stream] = order
	}
	return order
}

// longest returns the largest prompt plus output, or 0 when a prompt's length is unknown.
func longest(requests []Request) int {
	most := 0
	for i := range requests {
		if requests[i].PromptTokens == 0 {
			return 0
		}
		most = max(most, requests[i].PromptTokens+requests[i].OutputTokens)
	}
	return most
}

// keptEpochs bounds the memory of an endless source: the streams of a probe read one or two epochs at a time, and an
// epoch of conversations weighs about 3 MB and takes a few milliseconds to draw again.
const keptEpochs = 8

// An endless is a source that draws its requests epoch by epoch and remembers those that were used last.
type endless struct {
	name    string
	size    int // requests per epoch
	longest int
	draw    func(stream Stream, epoch int) []Request

	mu   sync.Mutex
	kept []epoch // most recently used first
}

// An epoch is one piece of a stream, drawn at once.
type epoch struct {
	stream   Stream
	number   int
	requests []Request
}

func (e *endless) Name() string { return e.name }

func (e *endless) Len() int { return 0 }

func (e *endless) Longest() int { return e.longest }

func (e *endless) Request(stream Stream, i int) *Request {
	return &e.epoch(stream, i/e.size)[i%e.size]
}

// epoch returns the requests of one epoch. It draws under the lock, so that two callers never draw the same one twice.
func (e *endless) epoch(stream Stream, number int) []Request {
	e.mu.Lock()
	defer e.mu.Unlock()
	at := slices.IndexFunc(e.kept, func(k epoch) bool { return k.stream == stream && k.number == number })
	var found epoch
	if at >= 0 {
		found = e.kept[at]
		e.kept = slices.Delete(e.kept, at, at+1)
	} else {
		found = epoch{stream, number, e.draw(stream, number)}
		if len(e.kept) == keptEpochs {
			e.kept = slices.Delete(e.kept, keptEpochs-1, keptEpochs)
		}
	}
	e.kept = slices.Insert(e.kept, 0, found)
	return found.requests
}
