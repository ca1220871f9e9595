package trial

import (
	"context"
	"errors"
	"fmt"

	"vllmtuner/serverctl"
)

// A Protocol says in which state the prefix cache is when a probe begins. On the calibrated H200 simulation it matters
// more than any flag: 0.8–1.7 req/s cold, 1.7–2.7 primed.
type Protocol string

// The protocols.
const (
	// Steady primes the cache from the workload's own stream until it is full and the hit rate stands still. The cache
	// is then carried from probe to probe. It is for endless sources.
	Steady Protocol = "steady"
	// Primed passes once through a finite source, and then carries the cache.
	Primed Protocol = "primed"
	// Reset empties the cache before each probe. The prompts of the lead-in share nothing with the window's. This
	// measures the cold value, and only under it is a resumed study exact to the last digit.
	Reset Protocol = "reset"
	// Carried begins with the cache that the warm-up has left, and carries it, as the manual sweeps did. It is for
	// sweeps alone: the lower loads prime the cache of the higher ones.
	Carried Protocol = "carried"
)

const (
	// A carried and an empty cache can be distinguished if their hit rates, 0 to 1, differ by at least this much. On
	// simulated servers the hit rate of a probe is at most 0.65 points below the recall's. With a carried cache it was
	// never in the lower half of the difference.
	minReuse = 0.01
	// An emptied cache must hold no more of the prompts than they share with one another. If it holds this much more,
	// other clients have sent the prompts.
	foreignReuse = 0.05
	// repeatedDraws keeps the draws of repetitions apart from all others. Requests that were just asked would be in the
	// cache.
	repeatedDraws = 1 << 20
	// A cache of unknown size is assumed to hold this many tokens.
	defaultKVTokens = 1 << 22
)

// A prefixCache keeps the prefix cache of a trial's server in the state that the protocol wants, and checks that it is.
type prefixCache struct {
	protocol    Protocol
	recall      *recall // nil where nothing is verified
	wrong       string  // what was wrong with the cache's state in the last probe; "" when it was right
	alwaysWrong bool    // a repetition was wrong too: the server's cache is not what the workload says it should be
	unknown     bool    // the state cannot be verified, and a note says so
}

// newPrefixCache begins with an empty cache. A kvTokens of 0 is an unknown size.
func newPrefixCache(protocol Protocol, kvTokens int) *prefixCache {
	c := &prefixCache{protocol: protocol}
	switch {
	case protocol == Carried:
	case kvTokens > 0:
		c.recall = newRecall(float64(kvTokens))
	case protocol == Reset:
		c.recall = newRecall(defaultKVTokens)
	}
	return c
}

// prepare puts the cache into the state in which a probe begins.
func (c *prefixCache) prepare(ctx context.Context, server Server) error {
	if c.recall != nil {
		c.recall.begin()
	}
	if c.protocol != Reset {
		return nil
	}
	err := server.ResetCache(ctx)
	if err != nil && !errors.Is(err, serverctl.ErrNoReset) { // ErrNoReset is the user's to fix, and no sign of a dying server
		err = serverError{err}
	}
	return err
}

// draw returns the number of a probe's draw. A repetition sends other requests, because the cache holds the requests of
// the first attempt. Under Reset it sends the same requests, because the cache is empty.
func (c *prefixCache) draw(seq int, again bool) int {
	if again && c.protocol != Reset {
		return seq + repeatedDraws
	}
	return seq
}

// judge compares a probe's hit rate with the hit rates that its requests would have in a carried cache and in an empty
// cache. Both count only the requests that were sent, so a probe that ended early can be judged too. A probe with
// preempted requests is not judged. These evict blocks that the cache would have kept, and look up their own again.
//
// unknown is why the state cannot be verified; a note says it once.
func (c *prefixCache) judge(p Probe, before, after serverctl.Counters) (unknown string) {
	c.wrong = ""
	switch {
	case c.protocol == Carried:
	case after.PrefixQueries < before.PrefixQueries:
		c.wrong = "the server's counters went back: it was started anew, and its prefix cache was empty"
	case p.HitRate < 0:
		unknown = "the server tells no hit rate"
	case c.recall == nil:
		unknown = "the server does not tell the size of its KV cache"
	case p.Preemptions > 0 || p.Measurement.Failed > 0 || p.Stopped && c.protocol == Reset:
	default:
		c.wrong = c.compare(p.HitRate)
	}
	if unknown == "" || c.unknown {
		return ""
	}
	c.unknown = true
	return unknown
}

// compare says what a hit rate shows to be wrong with the cache, or nothing.
func (c *prefixCache) compare(hitRate float64) string {
	carried, empty := c.recall.rates()
	alike := carried-empty < minReuse
	middle := (carried + empty) / 2
	switch {
	case c.protocol == Reset && (!alike && hitRate > max(middle, empty+minReuse) || hitRate > empty+foreignReuse):
		return fmt.Sprintf("the prefix cache was not empty when the probe began: hit rate %.1f %%, but its requests share only %.1f %% of "+
			"their prompts with one another", 100*hitRate, 100*empty)
	case c.protocol != Reset && !alike && hitRate < middle:
		return fmt.Sprintf("the prefix cache had lost what it held: hit rate %.1f %%; a cache that was carried on would have reached %.1f %%, "+
			"an empty one %.1f %%", 100*hitRate, 100*carried, 100*empty)
	}
	return ""
}
