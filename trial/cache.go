package trial

import (
	"context"
	"errors"
	"fmt"
	"math"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
)

// A Protocol says in which state the prefix cache is when a probe begins. On the calibrated H200 simulation it matters more
// than any flag: 0.8–1.7 req/s cold, 1.7–2.7 primed.
type Protocol string

// The protocols.
const (
	// Steady primes once from the workload's own stream until the cache is full and the hit rate stands still, then carries
	// the cache from probe to probe. For endless sources.
	Steady Protocol = "steady"
	// Primed passes once through a finite source, then carries the cache.
	Primed Protocol = "primed"
	// Reset empties the cache before each probe, and its lead-in asks prompts of which the window can use nothing: the cold value, and
	// the only protocol under which a resumed study is exact to the last digit.
	Reset Protocol = "reset"
	// Carried begins with what the warm-up has left and carries the cache on, as the manual sweeps did. For sweeps alone: the
	// lower loads prime the cache of the higher ones.
	Carried Protocol = "carried"
)

const (
	primePiece = 30.0 // seconds of load between two looks at the hit rate
	mostPieces = 60   // half an hour: more priming than that is a workload that never settles
	settled    = 0.01 // the hit rate stands still when it moves less than a point
)

// prime brings the cache into the state that the protocol wants before the first probe.
func (m *measuring) prime(ctx context.Context) error {
	if m.Cache == Reset {
		return nil
	}
	m.progress("priming the prefix cache")
	if n := m.Source.Len(); m.Cache == Primed && n > 0 {
		if err := m.pass(ctx, workload.PrimeStream, 0, n); err != nil {
			return fmt.Errorf("prime the cache: %w", err)
		}
		return nil
	}
	return m.primeUntilSteady(ctx)
}

func (m *measuring) primeRate() float64 {
	if m.PrimeRate > 0 {
		return m.PrimeRate
	}
	return m.firstRate
}

// primeUntilSteady sends load until prefilled and generated tokens exceed the KV cache and the hit rate stands still.
func (m *measuring) primeUntilSteady(ctx context.Context) error {
	start, err := m.counters(ctx)
	if err != nil {
		return err
	}
	if m.result.Facts.KVCacheTokens == 0 {
		m.result.Notes = append(m.result.Notes, "the size of the KV cache is not known: it was primed until the hit rate stood still, full or not")
	}
	n := max(1, int(math.Round(primePiece*m.primeRate())))
	before, last := start, math.Inf(1)
	for piece := range mostPieces {
		if err := m.pass(ctx, workload.PrimeStream, piece*n, n); err != nil {
			return fmt.Errorf("prime the cache: %w", err)
		}
		now, err := m.counters(ctx)
		if err != nil {
			return err
		}
		rate := hitRate(before, now)
		written := now.PromptTokens - now.PrefixHits + now.GenerationTokens - (start.PromptTokens - start.PrefixHits + start.GenerationTokens)
		if written > float64(m.result.Facts.KVCacheTokens) && math.Abs(rate-last) < settled {
			return nil
		}
		before, last = now, rate
	}
	m.result.Notes = append(m.result.Notes, fmt.Sprintf("the prefix-cache hit rate still moved after %d s of priming", int(primePiece*mostPieces)))
	return nil
}

// prepareCache brings the cache into the state in which a probe begins.
func (m *measuring) prepareCache(ctx context.Context) error {
	if m.Cache != Reset {
		return nil
	}
	err := m.server.ResetCache(ctx)
	if err != nil && !errors.Is(err, serverctl.ErrNoReset) { // which is the user's to mend
		err = serverError{err}
	}
	return err
}

// A cacheState is what is known of the prefix cache of a trial's server.
type cacheState struct {
	recall   *recall // nil where nothing is verified
	off      string  // what was wrong with it in the last probe; "" when nothing was
	habitual bool    // a repetition found the same: the server's cache is not what the workload says it should be
	unknown  bool    // said that it cannot be verified
}

const (
	// A cache can be told from an empty one where carrying it changes the hit rate by so much, 0 to 1. On simulated servers the hit rate of
	// a probe is that of a recall, carried or empty, to 0.65 points, or higher: a carried one never was in the lower half of the difference.
	leastReuse = 0.01
	// A cache that was emptied and has so much more of the prompts than they share with one another holds what somebody else has asked.
	foreignReuse = 0.05
	// againDraws keeps the draws of repetitions apart from all others: requests that have just been asked would be found in the cache.
	againDraws = 1 << 20
	// Where the size of the KV cache is not known a cache is taken to hold so many tokens.
	usualKVTokens = 1 << 22
)

// drawOf is the draw of a probe. The cache is empty under Reset, where a repetition asks the same once more.
func (m *measuring) drawOf(seq int, again bool) int {
	if again && m.Cache != Reset {
		return seq + againDraws
	}
	return seq
}

// recalled makes a load tell what a cache would keep of it.
func (m *measuring) recalled(schedule workload.Schedule) workload.Schedule {
	c := &m.cache
	if c.recall == nil {
		capacity := float64(m.result.Facts.KVCacheTokens)
		switch {
		case m.Cache == Carried, capacity == 0 && m.Cache != Reset:
			return schedule
		case capacity == 0:
			capacity = usualKVTokens
		}
		c.recall = newRecall(capacity)
	}
	return c.recall.watch(schedule)
}

// begin begins a probe.
func (c *cacheState) begin() {
	if c.recall != nil {
		c.recall.begin()
	}
}

// judgeCache holds the hit rate of a probe against what its requests would have found in a cache that was carried into it and in an
// empty one, and says in the state whether it was the wrong one. Both are of the requests that were sent, so that a probe that ended
// early can be judged as well, and one on a cold cache does end early. Where requests were preempted they push out what the cache
// would have kept, and look for their own blocks once more: that is overload, and not judged.
func (m *measuring) judgeCache(p Probe, before, after serverctl.Counters) {
	c := &m.cache
	c.off = ""
	switch {
	case m.Cache == Carried:
		return
	case after.PrefixQueries < before.PrefixQueries:
		c.off = "the server's counters went back: it was started anew, and its prefix cache was empty"
		return
	case p.HitRate < 0:
		m.unverified("the server tells no hit rate")
		return
	case c.recall == nil:
		m.unverified("the server does not tell the size of its KV cache")
		return
	case p.Preemptions > 0 || p.Measurement.Failed > 0 || p.Stopped && m.Cache == Reset:
		return
	}
	carried, empty := c.recall.rates()
	alike := carried-empty < leastReuse
	middle := (carried + empty) / 2
	switch {
	case m.Cache == Reset && (!alike && p.HitRate > max(middle, empty+leastReuse) || p.HitRate > empty+foreignReuse):
		c.off = fmt.Sprintf("the prefix cache was not empty when the probe began: hit rate %.1f %%, and its requests share no more than %.1f %% of "+
			"their prompts with one another", 100*p.HitRate, 100*empty)
	case m.Cache != Reset && !alike && p.HitRate < middle:
		c.off = fmt.Sprintf("the prefix cache had lost what it held: hit rate %.1f %%, with %.1f %% of the prompts in a cache that was carried on, "+
			"and %.1f %% in an empty one", 100*p.HitRate, 100*carried, 100*empty)
	}
}

// unverified says once that the state of the cache is not known.
func (m *measuring) unverified(why string) {
	if !m.cache.unknown {
		m.cache.unknown = true
		m.result.Notes = append(m.result.Notes, "the state of the prefix cache was not verified: "+why)
	}
}

// verified measures a probe, and once more when its cache was not in the protocol's state; the repetition replaces it. A server whose
// repetition was off as well is not asked twice again: that would double the cost of a trial and change nothing.
func (m *measuring) verified(measure func(again bool) (Probe, error)) (Probe, error) {
	p, err := measure(false)
	off := m.cache.off
	if err != nil || off == "" {
		return p, err
	}
	if m.cache.habitual {
		p.Note = join(off, p.Note)
		return p, nil
	}
	m.progress("again: %s", off)
	replaced := p.GPUTime
	p, err = measure(true)
	if err != nil {
		m.result.GPUTime += replaced
		return p, err
	}
	p.GPUTime += replaced
	p.Replaced = replaced
	note := "measured again, because " + off
	if m.cache.off != "" {
		m.cache.habitual = true
		note = "measured again, and again " + m.cache.off
	}
	p.Note = join(note, p.Note)
	return p, nil
}
