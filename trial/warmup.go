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
	// had as many requests.
	warmUpRequests = 10
	// A warm-up ends after maxWarmUps pieces, or after the first piece that ends later than warmUpLimit. If the server
	// is not warm by then, the result has a note.
	maxWarmUps  = 12
	warmUpLimit = 5 * time.Minute

	// TPOT has fallen if its median in a piece is below tpotFall times the lower quartile of the previous piece. On the
	// simulated H200, which is warm from its start, this happened by chance in 1 of 343 pieces.
	tpotFall = 0.9
	// TTFT has fallen if its median in a piece is below ttftFall times the minimum of the previous piece. The lower
	// quartile is no safe reference: on the simulated H200, 58 of 343 medians were below half of it. TTFT varies much
	// more than TPOT between requests, because it depends on the prompt's length, its cached part and the queue.
	ttftFall = 0.5
)

// warmUpAnswer is the length of a warm-up's answers in tokens. It is enough to see the time per token.
const warmUpAnswer = 128

const (
	primePiece     = 10 * time.Second // the requests of one piece of priming are due within this time; the hit rate is read after each piece
	primePart      = 0.25             // number of prompt tokens of a piece, as a fraction of the size of the KV cache
	defaultPiece   = 200              // number of requests of a piece if the size of the KV cache is not known
	maxPrimePieces = 60               // a hit rate that still changes after so many pieces will not become steady
	steadyHitRate  = 0.01             // the hit rate is steady if it changes by less than one percentage point
)

// A warmUp is the load before the first probe. It depends only on the current server and not on stored probes, so a
// resumed trial warms up in the same way.
type warmUp struct {
	*session
	drafts *drafts
	rate   float64 // requests per second, before the cache is primed
}

// run sends requests until the server is warm. Then it primes the prefix cache if the cache protocol asks for that.
func (w warmUp) run(ctx context.Context) error {
	w.task.progress("warming up")
	if err := w.untilWarm(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	now, err := readCounters(ctx, w.server)
	if err != nil {
		return err
	}
	if err := w.drafts.judge(speculation(serverctl.Counters{}, now)); err != nil {
		return err
	}
	return w.prime(ctx)
}

// untilWarm sends pieces of load until the latencies no longer fall. If the server drafts tokens, it continues until
// enough tokens were drafted to judge their acceptance. A server that is warm from its start gets two pieces.
func (w warmUp) untilWarm(ctx context.Context) error {
	began := w.result.GPUTime
	var last latencies
	warm := false
	for piece := range maxWarmUps {
		now, err := w.sendPiece(ctx, piece)
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

// sendPiece sends piece n of the warm-up, counted from 0, and returns its latencies.
func (w warmUp) sendPiece(ctx context.Context, n int) (latencies, error) {
	load := w.passOf(w.shortened(warmUpAnswer), workload.WarmUpStream, n*warmUpRequests, warmUpRequests, w.rate)
	run, err := w.sendUncounted(ctx, WarmingUp, countAll(load), nil, beforeProbes)
	return latenciesOf(run.Samples), err
}

// prime fills the prefix cache before the first probe, unless the cache protocol is Reset.
func (w warmUp) prime(ctx context.Context) error {
	if w.runner.Cache == Reset {
		return nil
	}
	w.task.progress("priming the prefix cache")
	piece, rate := w.primePiece()
	if n := w.runner.Source.Len(); w.runner.Cache == Primed && n > 0 {
		first := w.firstOfPass(n)
		return w.primeWith(ctx, first, n-first, rate)
	}
	return w.primeUntilSteady(ctx, piece, rate)
}

// firstOfPass returns the number of the first request that a pass over n requests needs to send. This request and the
// later ones fill the KV cache, so they would evict what earlier requests left there.
func (w warmUp) firstOfPass(n int) int {
	kv := float64(w.result.Facts.KVCacheTokens)
	held := newRecall(math.Inf(1))
	for i := n - 1; i > 0 && kv > 0; i-- {
		if held.ask(w.shortened(1).Request(workload.PrimeStream, i)); held.tokens > kv {
			return i
		}
	}
	return 0
}

// primePiece returns how many requests are sent between two readings of the hit rate, and at which rate. If the user
// has set no rate, the rate is so high that the server is never idle, because nobody waits for these answers.
func (w warmUp) primePiece() (requests int, rate float64) {
	seconds := primePiece.Seconds()
	if rate = w.runner.PrimeRate; rate > 0 {
		return max(1, int(math.Round(seconds*rate))), rate
	}
	requests = defaultPiece
	if kv := float64(w.result.Facts.KVCacheTokens); kv > 0 {
		requests = max(minPiece, min(maxPiece, int(primePart*kv/meanPrompt(w.runner.Source))))
	}
	return requests, max(minPrimeRate, float64(requests)/seconds)
}

// A piece has enough requests to measure a hit rate, and at most as many as a server accepts at once.
const (
	minPiece     = 20
	maxPiece     = 1000
	minPrimeRate = 20 // requests per second; a server can take so many, because most prompts of a conversation are cached and cost next to nothing
)

// meanPrompt is the mean length of the workload's prompts in tokens.
func meanPrompt(source workload.Source) float64 {
	return meanOf(source, func(q *workload.Request) int { return promptTokens(q) })
}

// primeWith sends n prompts, from number first on, and asks for answers of one token.
func (w warmUp) primeWith(ctx context.Context, first, n int, rate float64) error {
	pass := w.passOf(w.shortened(1), workload.PrimeStream, first, n, rate)
	if _, err := w.sendUncounted(ctx, Priming, pass, nil, beforeProbes); err != nil {
		return fmt.Errorf("prime the cache: %w", err)
	}
	return nil
}

// primeUntilSteady sends load until the prefilled and generated tokens exceed the KV cache. If the size of the cache is
// not known, it sends load until the hit rate is steady.
func (w warmUp) primeUntilSteady(ctx context.Context, n int, perSecond float64) error {
	start, err := readCounters(ctx, w.server)
	if err != nil {
		return err
	}
	kvTokens := float64(w.result.Facts.KVCacheTokens)
	if kvTokens == 0 {
		w.note("the size of the KV cache is not known: it was primed until the hit rate stopped changing, and may not be full")
	}
	before, lastRate := start, math.Inf(1)
	for piece := range maxPrimePieces {
		if err := w.primeWith(ctx, piece*n, n, perSecond); err != nil {
			return err
		}
		now, err := readCounters(ctx, w.server)
		if err != nil {
			return err
		}
		rate := hitRate(before, now)
		written := now.PromptTokens - now.PrefixHits + now.GenerationTokens - (start.PromptTokens - start.PrefixHits + start.GenerationTokens)
		if kvTokens > 0 && written > kvTokens || kvTokens == 0 && math.Abs(rate-lastRate) < steadyHitRate {
			return nil
		}
		before, lastRate = now, rate
	}
	w.note("the prefix-cache hit rate still changed after %d requests of priming", n*maxPrimePieces)
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
// Work that a server does only once, such as compiling, makes the early requests slower. A fall therefore shows such
// work, and a rise does not. The requests of two pieces differ, so the median must be clearly below the quick requests
// of the previous piece. If only the first requests of a piece were slow, the server was warm at the end of that piece.
func (l latencies) fellFrom(before latencies) bool {
	return l.ttft.median < ttftFall*before.ttft.min || l.tpot.median < tpotFall*before.tpot.quarter
}

// countAll moves all requests of a load into the window, because latencies are recorded only there.
func countAll(schedule workload.Schedule) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			a.Phase = workload.Window
			if !yield(a) {
				return
			}
		}
	}
}
