package workload

import (
	"slices"
	"sync"
)

// A population has the fields that all finite sources need.
type population struct {
	*order
	name   string
	repeat string // as in Spec
	vocab  int
	bad    badRows
}

func newPopulation(name string, spec Spec, seed uint64, n int) population {
	return population{order: &order{seed: seed, n: n, perms: make(map[Stream][]int)}, name: name, repeat: spec.Repeat, vocab: spec.VocabSize}
}

func (p *population) Name() string { return p.name }

func (p *population) Len() int { return p.n }

func (p *population) self() *population { return p }

// populationOf returns the population of a source. The result is empty for an endless source.
func populationOf(source Source) *population {
	if finite, ok := source.(interface{ self() *population }); ok {
		return finite.self()
	}
	return new(population)
}

// A finite source has a fixed population. Each stream goes through the population in its own order, again and again.
type finite struct {
	population
	at      func(i int) *Request // returns the i-th request of the population
	longest int
}

// newFinite returns a source of the given requests, which are in memory. There must be at least one.
func newFinite(name string, spec Spec, seed uint64, requests []Request) *finite {
	return &finite{newPopulation(name, spec, seed, len(requests)), func(i int) *Request { return &requests[i] }, longest(requests)}
}

func (f *finite) Longest() int { return f.longest }

func (f *finite) Request(stream Stream, i int) *Request {
	return f.salted(f.at(f.index(stream, i)), stream, i)
}

// An order is the order in which each stream goes through a population.
type order struct {
	seed     uint64
	n        int
	recorded bool // if true, the stream keeps the recorded order, in a cycle with a seeded start; if false, it is shuffled

	mu    sync.Mutex
	perms map[Stream][]int
}

// index returns the place that the stream's i-th request has in the population. Recorded traffic is not shuffled,
// because neighbours belong together: a turn of a conversation finds the earlier turns in the cache.
func (o *order) index(stream Stream, i int) int {
	if o.recorded {
		return (chance(o.seed, shuffleDraws, stream, 0).IntN(o.n) + i%o.n) % o.n
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	perm := o.perms[stream]
	if perm == nil {
		perm = chance(o.seed, shuffleDraws, stream, 0).Perm(o.n)
		o.perms[stream] = perm
	}
	return perm[i%o.n]
}

// longest returns the largest sum of prompt and output tokens, or 0 if a prompt's length is unknown.
func longest(requests []Request) int {
	largest := 0
	for i := range requests {
		if requests[i].PromptTokens == 0 {
			return 0
		}
		largest = max(largest, requests[i].PromptTokens+requests[i].OutputTokens)
	}
	return largest
}

// keptEpochs bounds the memory of an endless source. The streams of a probe read one or two epochs at a time. An epoch
// of conversations takes about 3 MB, and drawing it takes a few milliseconds.
const keptEpochs = 8

// An endless source draws its requests at random, epoch by epoch, and keeps the latest epochs.
type endless struct {
	name    string
	size    int // requests per epoch
	longest int
	draw    func(stream Stream, epoch int) []Request

	mu   sync.Mutex
	kept []epoch // most recently used first
}

// An epoch is a part of a stream that is drawn at once.
type epoch struct {
	stream   Stream
	number   int // number of the epoch in its stream, from 0
	requests []Request
}

func (e *endless) Name() string { return e.name }

func (e *endless) Len() int { return 0 }

func (e *endless) Longest() int { return e.longest }

func (e *endless) Request(stream Stream, i int) *Request {
	return &e.epoch(stream, i/e.size)[i%e.size]
}

// epoch returns the requests of one epoch. It draws under the lock, so that two callers never draw the same epoch.
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
