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
	// warmUpRequests is the number of requests in one piece of the warm-up. In sweeps made by hand, the whole warm-up
	// had as many.
	warmUpRequests = 10
	// A warm-up ends after maxWarmUps pieces, or after the first piece that ends later than warmUpLimit. If the server
	// is not warm by then, the result has a note.
	maxWarmUps  = 12
	warmUpLimit = 5 * time.Minute

	// TPOT has fallen if its median in a piece is below tpotFall times the lower quartile of the previous piece. On the
	// simulated H200, which is warm from its start, this happened by chance in 1 of 343 pieces.
	tpotFall = 0.9
	// TTFT has fallen if its median in a piece is below ttftFall times the minimum of the previous piece. The lower
	// quartile would not do: on the simulated H200, 58 of 343 medians were below half of it. TTFT varies much more than
	// TPOT between requests, because it depends on the prompt's length, its cached part and the queue.
	ttftFall = 0.5
)

const (
	primePiece     = 30.0 // seconds of load between two readings of the hit rate
	maxPrimePieces = 60   // half an hour of load; a hit rate that still changes after that will not settle
	steadyHitRate  = 0.01 // the hit rate is steady if it changes by less than one percentage point
)

// A warmUp is the load before the first probe. It depends only on the current server and not on stored probes, so a
// resumed trial warms up in the same way.
type warmUp struct {
	*session
	drafts *drafts
	rate   float64 // requests per second
}

// run sends requests until the server is warm. Then it primes the prefix cache if the cache protocol asks for that.
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

// untilWarm sends pieces of load until the latencies no longer fall. If the server drafts tokens, it continues until
// enough tokens were drafted to judge their acceptance. A server that is warm from its start gets two pieces.
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

// piece sends piece n of the warm-up, counted from 0, and returns its latencies.
func (w warmUp) piece(ctx context.Context, n int) (latencies, error) {
	load := passOf(w.runner, workload.WarmUpStream, n*warmUpRequests, warmUpRequests, w.rate)
	run, err := w.uncounted(ctx, counted(load), nil, beforeProbes)
	return latenciesOf(run.Samples), err
}

// prime fills the prefix cache before the first probe, unless the cache protocol is Reset.
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

// primeUntilSteady sends load until two conditions hold: the prefilled and generated tokens exceed the KV cache, and
// the hit rate is steady.
func (w warmUp) primeUntilSteady(ctx context.Context) error {
	start, err := readCounters(ctx, w.server)
	if err != nil {
		return err
	}
	kvTokens := float64(w.result.Facts.KVCacheTokens)
	if kvTokens == 0 {
		w.note("the size of the KV cache is not known: it was primed until the hit rate stopped changing, and may not be full")
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
	w.note("the prefix-cache hit rate still changed after %d s of priming", int(primePiece*maxPrimePieces))
	return nil
}

// latencies has quantiles of one piece of the warm-up, in milliseconds. They are 0 if no request was completed.
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

// fellFrom reports whether a latency fell since the previous piece. A fall means that the server was not warm then.
// Work that a server does only once, such as compiling, makes requests slower. So only a fall shows such work, and a
// rise does not. The requests of two pieces differ, so the median must be clearly below the quick requests of the
// previous piece. If only the first requests of a piece were slow, the server was warm at the end of that piece.
func (l latencies) fellFrom(before latencies) bool {
	return l.ttft.median < ttftFall*before.ttft.min || l.tpot.median < tpotFall*before.tpot.quarter
}

// counted moves all requests of a load into the window, because only the window records latencies.
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
