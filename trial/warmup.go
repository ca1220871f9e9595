package trial

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
)

const (
	// warmUpRequests are sent at a time, as many as the manual sweeps sent in all.
	warmUpRequests = 10
	// A warm-up has at most maxWarmUps pieces, and takes at most warmUpLimit. A server that is not warm by then is
	// noted as cold.
	maxWarmUps  = 12
	warmUpLimit = 5 * time.Minute

	// The median TPOT of a piece has fallen when it is below this part of the lower quartile of the piece before. On
	// the simulated H200, which is warm from its start, that is so for 1 of 343 pieces.
	tpotFall = 0.9
	// The median TTFT has fallen when it is below this part of the quickest of the piece before. TTFT depends on the
	// draw far more than TPOT, by length of prompt, cached part and queue. There 58 of 343 medians were below half the
	// lower quartile before.
	ttftFall = 0.5
)

const (
	primePiece     = 30.0 // seconds of load between two readings of the hit rate
	maxPrimePieces = 60   // half an hour of load; a hit rate that still moves then will not settle
	steadyHitRate  = 0.01 // the hit rate stands still when it moves by less than a point
)

// A warmUp is the load before the first probe. It depends on this start of the server alone, so that a resumed trial
// warms up as it did before.
type warmUp struct {
	*session
	drafts *drafts
	rate   float64 // requests per second
}

// run sends requests until the server is warm, and primes the prefix cache where the protocol says so.
func (w warmUp) run(ctx context.Context) error {
	w.task.progress("warming up")
	if err := w.untilWarm(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	if err := w.prime(ctx); err != nil {
		return err
	}
	now, err := readCounters(ctx, w.server)
	if err != nil {
		return err
	}
	return w.drafts.judge(speculation(serverctl.Counters{}, now))
}

// untilWarm sends pieces of load until latencies no longer fall. A server that drafts gets more of them until its
// acceptance is known. A server that is warm from its start gets two.
func (w warmUp) untilWarm(ctx context.Context) error {
	began := w.result.GPUTime
	var last latencies
	warm := false
	for piece := range maxWarmUps {
		now, err := w.piece(ctx, piece)
		if err != nil {
			return err
		}
		warm = warm || piece > 0 && !now.fellFrom(last)
		last = now
		w.drafts.tpot = now.tpot.median
		counters, err := readCounters(ctx, w.server)
		if err != nil {
			return err
		}
		lacking := w.drafts.lacking(counters)
		if warm && lacking == "" {
			return nil
		}
		if took := w.result.GPUTime - began; piece+1 == maxWarmUps || took >= warmUpLimit {
			state := "warm"
			if !warm {
				state, lacking = "not warm", join("its latencies still fell", lacking)
			}
			w.note("the server was %s after %d requests and %.0f s: %s", state, (piece+1)*warmUpRequests, took.Seconds(), lacking)
			return nil
		}
	}
	return nil
}

// piece sends the n-th requests of the warm-up, from 0.
func (w warmUp) piece(ctx context.Context, n int) (latencies, error) {
	load := passOf(w.runner, workload.WarmUpStream, n*warmUpRequests, warmUpRequests, w.rate)
	run, err := w.uncounted(ctx, counted(load), nil, beforeProbes)
	return latenciesOf(run.Samples), err
}

// prime puts the cache into the state that the protocol wants before the first probe.
func (w warmUp) prime(ctx context.Context) error {
	if w.runner.Cache == Reset {
		return nil
	}
	w.task.progress("priming the prefix cache")
	if n := w.runner.Source.Len(); w.runner.Cache == Primed && n > 0 {
		return w.primeWith(ctx, 0, n)
	}
	return w.primeUntilSteady(ctx)
}

func (w warmUp) primeWith(ctx context.Context, first, n int) error {
	if err := w.pass(ctx, workload.PrimeStream, first, n, w.rate); err != nil {
		return fmt.Errorf("prime the cache: %w", err)
	}
	return nil
}

// primeUntilSteady sends load until prefilled and generated tokens exceed the KV cache and the hit rate stands still.
func (w warmUp) primeUntilSteady(ctx context.Context) error {
	start, err := readCounters(ctx, w.server)
	if err != nil {
		return err
	}
	kvTokens := float64(w.result.Facts.KVCacheTokens)
	if kvTokens == 0 {
		w.note("the size of the KV cache is not known: it was primed until the hit rate stood still, full or not")
	}
	n := max(1, int(math.Round(primePiece*w.rate)))
	before, lastRate := start, math.Inf(1)
	for piece := range maxPrimePieces {
		if err := w.primeWith(ctx, piece*n, n); err != nil {
			return err
		}
		now, err := readCounters(ctx, w.server)
		if err != nil {
			return err
		}
		rate := hitRate(before, now)
		written := now.PromptTokens - now.PrefixHits + now.GenerationTokens - (start.PromptTokens - start.PrefixHits + start.GenerationTokens)
		if written > kvTokens && math.Abs(rate-lastRate) < steadyHitRate {
			return nil
		}
		before, lastRate = now, rate
	}
	w.note("the prefix-cache hit rate still moved after %d s of priming", int(primePiece*maxPrimePieces))
	return nil
}

// latencies describes the requests of one piece of the warm-up, in milliseconds; 0 when no request was completed.
type latencies struct{ ttft, tpot quantiles }

type quantiles struct{ min, quarter, median float64 }

func latenciesOf(samples []bench.Sample) latencies {
	var ttft, tpot []float64
	for _, s := range samples {
		if !s.OK() {
			continue
		}
		ttft = append(ttft, s.TTFT().Seconds()*1000)
		if each, ok := s.TPOT(); ok {
			tpot = append(tpot, each.Seconds()*1000)
		}
	}
	return latencies{quantilesOf(ttft), quantilesOf(tpot)}
}

func quantilesOf(values []float64) quantiles {
	slices.Sort(values)
	return quantiles{bench.Percentile(values, 0), bench.Percentile(values, 25), bench.Percentile(values, 50)}
}

// fellFrom reports whether a latency fell since the piece before. Work that a server does once, such as compiling,
// makes requests slower and never quicker, so a rise is no sign of it. The requests of two pieces differ, so the median
// must lie clearly below what was quick before. A piece whose first requests alone were slow was warm at its end.
func (l latencies) fellFrom(before latencies) bool {
	return l.ttft.median < ttftFall*before.ttft.min || l.tpot.median < tpotFall*before.tpot.quarter
}

// counted moves a load into the window, because only the window records latencies.
func counted(schedule workload.Schedule) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			a.Phase = workload.Window
			if !yield(a) {
				return
			}
		}
	}
}
