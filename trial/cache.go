package trial

import (
	"context"
	"errors"
	"fmt"

	"vllmtuner/serverctl"
)

// A Protocol says in which state the prefix cache is when a probe begins. This state matters more than any flag of the
// server. The calibrated H200 simulation carries 0.8–1.7 req/s with a cold cache and 1.7–2.7 req/s with a primed one.
type Protocol string

// The protocols.
const (
	// Steady primes the cache with the workload's own requests until the cache is full. If its size is not known, it
	// primes until the hit rate no longer changes. After that the cache is never emptied. Steady is for endless sources.
	Steady Protocol = "steady"
	// Primed sends each request of a finite source once before the first probe. After that the cache is never emptied.
	Primed Protocol = "primed"
	// Reset empties the cache before each probe. The prompts of the lead-in share nothing with the prompts of the window,
	// so the window measures a cold cache. Only with Reset does a resumed study give the same result to the last digit.
	Reset Protocol = "reset"
	// Carried begins with the cache that the warm-up left, and never empties it, as the manual sweeps did. It is for
	// sweeps alone: the lower loads prime the cache for the higher ones.
	Carried Protocol = "carried"
)

const (
	// A measured hit rate distinguishes a carried cache from an empty cache only if the two predicted rates (0 to 1)
	// differ by at least minReuse. On simulated servers the measured rate was at most 0.65 percentage points below the
	// prediction of type recall. With a carried cache the measured rate was never nearer to the prediction for an empty
	// cache.
	minReuse = 0.01
	// In an emptied cache, a probe's requests find only what they share with one another. If the hit rate (0 to 1)
	// exceeds that share by more than foreignReuse, other clients have sent the same prompts.
	foreignReuse = 0.05
	// If the hit rate (0 to 1) is lower than the prediction for an empty cache by more than belowEmpty, the predictions
	// are wrong.
	belowEmpty = 0.03
	// If a probe is repeated, repeatedDraws is added to the number of its draw (one set of random requests). The
	// repetition must send other requests, because the cache holds the requests of the first attempt.
	repeatedDraws = 1 << 20
	// A cache of unknown size is assumed to hold defaultKVTokens tokens.
	defaultKVTokens = 1 << 22
)

// A prefixCache keeps the prefix cache of a trial's server in the state that the protocol wants, and verifies that
// state.
type prefixCache struct {
	protocol    Protocol
	verified    bool    // whether the state is verified
	recall      *recall // predicts hit rates; nil if nothing is verified
	wrong       string  // what was wrong with the cache's state in the last probe; "" when it was right
	alwaysWrong bool    // a repeated probe found a wrong state again, so no later probe is repeated
	unknown     bool    // the state cannot be verified, and a note says so
}

// newPrefixCache assumes that the server's cache is empty. A kvTokens of 0 means that the size of the cache is unknown.
// If verified is false, nothing is verified.
func newPrefixCache(protocol Protocol, kvTokens int, verified bool) *prefixCache {
	c := &prefixCache{protocol: protocol, verified: verified && protocol != Carried}
	switch {
	case !c.verified:
	case kvTokens > 0:
		c.recall = newRecall(float64(kvTokens))
	case protocol == Reset:
		c.recall = newRecall(defaultKVTokens)
	}
	return c
}

// prepare puts the cache into the state in which the protocol begins a probe.
func (c *prefixCache) prepare(ctx context.Context, server Server) error {
	if c.recall != nil {
		c.recall.begin()
	}
	if c.protocol != Reset {
		return nil
	}
	err := server.ResetCache(ctx)
	if err != nil && !errors.Is(err, serverctl.ErrNoReset) { // only the user can fix the cause of ErrNoReset; it is no sign of a dying server
		err = serverError{err}
	}
	return err
}

// draw returns the number that decides which requests a probe sends; seq is the probe's own number. A repetition
// (isRepeat) sends other requests, because the cache holds the requests of the first attempt. Under Reset, a repetition
// sends the same requests, because the cache is empty.
func (c *prefixCache) draw(seq int, isRepeat bool) int {
	if isRepeat && c.protocol != Reset {
		return seq + repeatedDraws
	}
	return seq
}

// judge compares a probe's hit rate with two predictions: for a carried cache and for an empty cache. Both predictions
// count only the requests that were sent, so a probe that ended early can be judged too. A probe with preempted
// requests is not judged. Preemption evicts blocks that the cache would have kept, and a preempted request looks up its
// own blocks again.
//
// If the state cannot be verified, judge returns why. It does so only once, for a note.
func (c *prefixCache) judge(p Probe, before, after serverctl.Counters) (unknown string) {
	c.wrong = ""
	switch {
	case !c.verified:
	case after.PrefixQueries < before.PrefixQueries:
		c.wrong = "the server's counters went back: the server was restarted, and its prefix cache was empty"
	case p.HitRate < 0:
		unknown = "the server does not report its hit rate"
	case c.recall == nil:
		unknown = "the server does not report the size of its KV cache"
	case p.Preemptions > 0 || p.Measurement.Failed > 0 || p.Stopped && c.protocol == Reset:
	case c.protocol != Reset && c.crowded(p.HitRate):
		unknown = "requests in flight hold so much of the KV cache that little is left for prefixes"
	default:
		c.wrong = c.compare(p.HitRate)
	}
	if unknown == "" || c.unknown {
		return ""
	}
	c.unknown = true
	return unknown
}

// crowded reports whether the hit rate is below what even an empty cache would reach. The predictions ignore that
// requests in flight occupy a part of the cache, so in this case the predictions are wrong.
func (c *prefixCache) crowded(hitRate float64) bool {
	_, empty := c.recall.rates()
	return hitRate < empty-belowEmpty
}

// compare returns what is wrong with the cache according to a hit rate, or "" if nothing is.
func (c *prefixCache) compare(hitRate float64) string {
	carried, empty := c.recall.rates()
	alike := carried-empty < minReuse
	middle := (carried + empty) / 2
	switch {
	case c.protocol == Reset && (!alike && hitRate > max(middle, empty+minReuse) || hitRate > empty+foreignReuse):
		return fmt.Sprintf("the prefix cache was not empty when the probe began: hit rate %.1f %%, but its requests share only %.1f %% of "+
			"their prompts with one another", 100*hitRate, 100*empty)
	case c.protocol != Reset && !alike && hitRate < middle:
		return fmt.Sprintf("the prefix cache had lost its content: hit rate %.1f %%; a cache kept from the previous probe would have reached %.1f %%, "+
			"an empty cache %.1f %%", 100*hitRate, 100*carried, 100*empty)
	}
	return ""
}
