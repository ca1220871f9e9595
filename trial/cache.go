package trial

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

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
	// Reset empties the cache before each probe: the cold value, and the only protocol under which a resumed study is exact
	// to the last digit.
	Reset Protocol = "reset"
	// Carried begins with what the warm-up has left and carries the cache on, as the manual sweeps did. For sweeps alone: the
	// lower loads prime the cache of the higher ones.
	Carried Protocol = "carried"
)

const (
	primePiece     = 30.0 // seconds of load between two looks at the hit rate
	mostPieces     = 60   // half an hour: more priming than that is a workload that never settles
	settled        = 0.01 // the hit rate stands still when it moves less than a point
	warmUpRequests = 10   // before anything else, to get lazy initialisation out of the way; as the manual sweeps did
)

// warmUp sends the first requests, and primes the cache once where the protocol says so. It is worth nothing half done, so an
// orderly end does not wait for it.
func (m *measuring) warmUp(ctx context.Context) error {
	return m.unlessFinished(ctx, m.fillCache)
}

// fillCache is warmUp without the orderly end.
func (m *measuring) fillCache(ctx context.Context) error {
	m.progress("warming up")
	if err := m.pass(ctx, workload.WarmUpStream, 0, warmUpRequests); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
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

// pass sends n requests of a stream, uncounted, and waits until the server is idle again.
func (m *measuring) pass(ctx context.Context, stream workload.Stream, first, n int) error {
	p := workload.Pass{Source: m.Source, Seed: m.Seed, Stream: stream, Rate: m.primeRate(), First: first, N: n}
	began := time.Now()
	run, err := m.load.Run(ctx, p.Schedule(), nil)
	if err != nil {
		m.result.GPUTime += time.Since(began) // spent all the same
		return err
	}
	m.result.GPUTime += run.Elapsed
	if run.Broken == run.Others && n > 0 {
		return m.useless(ctx, fmt.Sprintf("all %d requests before the first probe failed: %s", n, run.BrokenDetail))
	}
	if run.Broken > 0 {
		m.result.Notes = append(m.result.Notes, fmt.Sprintf("%d of %d requests before the first probe failed: %s", run.Broken, run.Others, run.BrokenDetail))
	}
	drained, err := m.server.Drain(ctx)
	m.result.GPUTime += drained
	if err != nil {
		return serverError{err}
	}
	return nil
}

// deathNotice is how long a server that answers nothing well has to die, so that its own last words are the evidence.
const deathNotice = 10 * time.Second

// useless is the error of a server that is up and fails every request.
func (m *measuring) useless(ctx context.Context, evidence string) error {
	return AwaitDeath(ctx, m.server, &serverctl.ExitError{Class: serverctl.CrashLoad, Evidence: evidence, Code: -1})
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
