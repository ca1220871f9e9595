package otherengine

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"

	"vllmtuner/serverctl"
)

// A sequence is one request in the engine. Its answer always has the wanted number of tokens.
type sequence struct {
	prompt, answer float64 // tokens
	chunks         []uint64
	sample         int // index of its bench.Sample in the run; -1 when the request is not counted

	done     float64 // tokens that the answer had when the sequence last began to decode
	began    float64 // engine.work when the sequence last began to decode
	admitted int     // number of admissions before this one
}

// endsAt returns the value of engine.work at which the answer is complete.
func (s *sequence) endsAt() float64 { return s.began + s.answer - s.done }

// An engine decodes all its sequences at the same speed. Meanwhile it prefills at most one prompt. Time moves from
// event to event.
type engine struct {
	machine *Machine
	flags   flags
	room    float64 // size of the KV cache, tokens

	clock              float64 // seconds of load since the start
	chance             *rand.Rand
	pauseFrom, pauseTo float64 // begin and end of the current pause, or of the next one, on the clock

	waiting    []*sequence
	prefilling *sequence
	left       float64     // tokens that the prefill must still compute
	decoding   []*sequence // in the order of endsAt
	work       float64     // tokens that a sequence would have if it had decoded since the start
	used       float64     // tokens that sequences hold in the KV cache
	admitted   int         // number of admissions
	cache      *cache
	counters   serverctl.Counters
}

func newEngine(m *Machine, f flags, seed uint64) *engine {
	e := &engine{machine: m, flags: f, room: math.Floor(m.kvTokens(f)), chance: rand.New(rand.NewPCG(seed, 0x07e)), cache: newCache()}
	e.pauseFrom, e.pauseTo = math.Inf(1), math.Inf(1)
	if m.PauseEvery > 0 {
		e.nextPause(0)
	}
	return e
}

func (e *engine) nextPause(after float64) {
	m := e.machine
	e.pauseFrom = after + m.PauseEvery*e.chance.ExpFloat64()
	e.pauseTo = e.pauseFrom + m.PauseLeast + (m.PauseMost-m.PauseLeast)*e.chance.Float64()
}

func (e *engine) idle() bool { return len(e.waiting)+len(e.decoding) == 0 && e.prefilling == nil }

func (e *engine) paused() bool { return e.clock >= e.pauseFrom }

// speeds returns the tokens per second of each decoding sequence and of the prefill.
func (e *engine) speeds() (decode, prefill float64) {
	if e.paused() {
		return 0, 0
	}
	m, batch := e.machine, e.flags.batch
	if len(e.decoding) > 0 {
		decode = m.Decode / (float64(len(e.decoding)) + m.Half)
	}
	if e.prefilling != nil {
		decode *= 1 - batch/(batch+m.Share)
		prefill = m.Prefill * batch / (batch + m.Chunk)
	}
	return decode, prefill
}

// untilEvent returns the time until the next event in the engine, in seconds. If the engine is idle, the time is
// infinite.
func (e *engine) untilEvent() float64 {
	next := math.Inf(1)
	if e.idle() {
		return next
	}
	next = e.pauseFrom - e.clock
	if e.paused() {
		return e.pauseTo - e.clock
	}
	decode, prefill := e.speeds()
	if prefill > 0 {
		next = min(next, e.left/prefill)
	}
	if decode > 0 {
		next = min(next, (e.decoding[0].endsAt()-e.work)/decode)
	}
	if decode > 0 && e.shares() {
		next = min(next, (e.room-e.used)/(decode*float64(len(e.decoding))))
	}
	return max(0, next)
}

// move lets time pass. During this time, nothing may begin or end.
func (e *engine) move(seconds float64) {
	decode, prefill := e.speeds()
	e.work += decode * seconds
	tokens := decode * seconds * float64(len(e.decoding))
	e.used += tokens
	e.counters.GenerationTokens += tokens
	e.left -= prefill * seconds
	e.clock += seconds
	if e.clock >= e.pauseTo-tiny {
		e.clock = max(e.clock, e.pauseTo)
		e.nextPause(e.clock)
	}
}

// tiny is a time in seconds, or a part of a token, that is too small to matter. Comparisons ignore such a difference,
// because sums are rounded.
const tiny = 1e-7

// settle ends the complete sequences and the complete prefill. It evicts sequences when the KV cache is full, and then
// begins the next prefill if possible. It returns the sequences that got their first token, and those that got their
// last token.
func (e *engine) settle() (first, last []*sequence) {
	for len(e.decoding) > 0 && e.decoding[0].endsAt()-e.work < tiny {
		s := e.decoding[0]
		e.decoding = e.decoding[1:]
		e.used -= s.prompt + s.answer
		e.cache.add(s.chunks)
		last = append(last, s)
	}
	if s := e.prefilling; s != nil && e.left < tiny {
		e.prefilling = nil
		e.cache.add(s.chunks)
		if s.done == 0 {
			s.done = 1
			e.used++
			first = append(first, s)
		}
		s.began = e.work
		at, _ := slices.BinarySearchFunc(e.decoding, s.endsAt(), func(o *sequence, at float64) int { return cmp.Compare(o.endsAt(), at) })
		e.decoding = slices.Insert(e.decoding, at, s)
	}
	for e.used > e.room-tiny && e.shares() {
		e.evict()
	}
	e.admit()
	return first, last
}

// shares reports whether a decoding sequence shares the KV cache with another sequence. A single sequence always fits.
func (e *engine) shares() bool {
	return len(e.decoding) > 1 || len(e.decoding) == 1 && e.prefilling != nil
}

// evict takes the KV cache from the decoding sequence that was admitted last. The engine will compute all tokens of
// that sequence again.
func (e *engine) evict() {
	s := slices.MaxFunc(e.decoding, func(a, b *sequence) int { return cmp.Compare(a.admitted, b.admitted) })
	e.decoding = slices.DeleteFunc(e.decoding, func(o *sequence) bool { return o == s })
	s.done += e.work - s.began
	e.used -= s.prompt + s.done
	e.waiting = slices.Insert(e.waiting, 0, s)
	e.counters.Preemptions++
}

// spare is the fraction of the KV cache that an admission must leave free. Without spare room, a sequence could be
// evicted soon after each admission.
const spare = 0.02

// admit begins the next prefill if no prefill is running and the next waiting sequence fits.
func (e *engine) admit() {
	if e.prefilling != nil || len(e.waiting) == 0 || float64(len(e.decoding)) >= e.flags.seqs {
		return
	}
	s := e.waiting[0]
	need := s.prompt + s.done
	if e.used+need > (1-spare)*e.room && len(e.decoding) > 0 {
		return
	}
	e.waiting = e.waiting[1:]
	e.used += need
	e.cache.keep(int(max(0, e.room-e.used)) / chunk)
	e.prefilling, e.left = s, need
	if !e.machine.NoCache {
		hit := float64(e.cache.has(s.chunks) * chunk)
		e.left = max(1, need-hit)
		e.counters.PrefixQueries += s.prompt
		e.counters.PrefixHits += hit
	}
	e.counters.PromptTokens += s.prompt
	s.admitted = e.admitted
	e.admitted++
}

// abort drops every sequence.
func (e *engine) abort() {
	e.waiting, e.prefilling, e.decoding, e.used, e.left = nil, nil, nil, 0, 0
}
