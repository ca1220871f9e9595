package workload

import (
	"slices"
	"sync"
)

// A finite is a source with a fixed population that each stream passes through in its own order, again and again.
type finite struct {
	name    string
	order   *order
	at      func(i int) *Request // the i-th of the population
	longest int
	policy  policy
	bad     badRows
}

// newFinite returns a source of requests that are in memory, at least one.
func newFinite(name string, spec Spec, seed uint64, requests []Request) *finite {
	return &finite{
		name: name, order: newOrder(seed, len(requests)), at: func(i int) *Request { return &requests[i] },
		longest: longest(requests), policy: spec.policy(seed),
	}
}

func (f *finite) Name() string { return f.name }

func (f *finite) Len() int { return f.order.n }

func (f *finite) Longest() int { return f.longest }

func (f *finite) Request(stream Stream, i int) *Request {
	request := f.at(f.order.place(stream, i))
	if repetition := i / f.order.n; repetition > 0 && f.policy.repeat == Salt {
		return f.policy.salted(request, stream, repetition)
	}
	return request
}

// An order is in which order each stream passes through a population.
type order struct {
	seed     uint64
	n        int
	recorded bool // from a seeded place on as recorded, round and round; else shuffled

	mu    sync.Mutex
	perms map[Stream][]int
}

func newOrder(seed uint64, n int) *order {
	return &order{seed: seed, n: n, perms: make(map[Stream][]int)}
}

// place returns which of the population is the stream's i-th. Neighbours in recorded traffic belong together, such as the
// turns of a conversation, which find each other in the cache: a shuffle would tear them apart.
func (o *order) place(stream Stream, i int) int {
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
