package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/tuner/space"
)

const (
	// worstLimit is how long the worst case may last. A server that can admit all requests of the worst case does so
	// much earlier.
	worstLimit = time.Minute
	// worstFill is the size of the worst case relative to the KV cache. It is above 1, so that requests are preempted
	// or wait.
	worstFill = 1.25
	// worstScan is the number of requests among which the worst case looks for the longest prompts.
	worstScan = 1000
	// Answers of the worst case are cut to worstMinAnswer tokens, plus one token for each step that reads prompts.
	worstMinAnswer = 16
	// These values are used if the server does not report its own: vLLM's largest default of max-num-seqs, and its
	// smallest default of max-num-batched-tokens (get_batch_defaults in vllm/engine/arg_utils.py, 0.14.1).
	defaultSeqs, defaultBatch = 1024, 2048
	// charsPerToken is the number of characters per token in English text. It is used if only the server could count
	// tokens.
	charsPerToken = 4
)

// A worstCase is the largest load that a server admits. A point counts only if its server survives this load.
type worstCase struct {
	*session
	shown bool // the server has survived such a load in a probe
}

// saw notes whether a probe was as heavy as the worst case.
func (w *worstCase) saw(p Probe) {
	running := 0.0
	if p.Server != nil && len(p.Server.Running) > 0 {
		running = slices.Max(p.Server.Running)
	}
	// Preemptions show a full KV cache, because a server preempts requests only then.
	w.shown = w.shown || p.Preemptions > 0 || running >= float64(w.setting("max-num-seqs", defaultSeqs))
}

// setting returns the value of a server's flag: what the server reports, or what its args say. If both are missing, it
// returns the fallback.
func (w *worstCase) setting(flag string, fallback int) int {
	texts := []string{w.result.Facts.Args[flag]}
	flags, _ := space.Flags(w.task.Args) // no error: a server has started with these args
	for _, f := range flags {
		if f.Name == flag {
			texts = append(texts, f.Values...)
		}
	}
	for _, text := range texts {
		if n, err := strconv.Atoi(text); err == nil && n > 0 {
			return n
		}
	}
	return fallback
}

// survive sends the worst case, unless a probe was as heavy. It sends as many requests at once as the server may run,
// with the longest prompts of the workload. The result is not stored, so a resumed trial sends the worst case again.
func (w *worstCase) survive(ctx context.Context) error {
	if !w.runner.WorstCase || w.shown {
		return nil
	}
	requests := w.requests()
	longest, shortest := promptTokens(&requests[0]), promptTokens(&requests[len(requests)-1])
	what := fmt.Sprintf("%s at once with prompts of %d to %d tokens", render.Count(len(requests), "request"), shortest, longest)
	w.task.progress("worst case: %s", what)
	endSeries := w.server.Observe(time.Now())
	before := w.result.GPUTime
	atLimit := func(now time.Duration, _ []bench.Sample) bool { return now >= worstLimit }
	run, err := w.sendUncounted(ctx, WorstLoad, atOnce(requests), atLimit, "of the worst case")
	series := endSeries()
	if err = explain(ctx, w.server, err); err != nil {
		if exit, ok := errors.AsType[*serverctl.ExitError](err); ok {
			died := *exit
			died.Evidence = join(died.Evidence, "it had survived its search, and died under "+what)
			return &died
		}
		return err
	}
	text := fmt.Sprintf("the server survived %s after the search", what)
	if series != nil && len(series.Running) > 0 {
		text += fmt.Sprintf("; at most %.0f of them ran at the same time", slices.Max(series.Running))
	}
	if run.Stopped {
		text += fmt.Sprintf("; some of them got no answer within %s", render.Took(worstLimit))
	}
	w.note("%s (%.0f s)", text, (w.result.GPUTime - before).Seconds())
	return nil
}

// requests returns the requests of the worst case, the longest prompts first. There are max-num-seqs requests, or fewer
// if fewer overfill the KV cache. Answers are cut short. They are long enough that the first request still runs when
// the last one is admitted.
func (w *worstCase) requests() []workload.Request {
	candidates := longestPrompts(w.runner.Source)
	room := math.Inf(1)
	if tokens := w.result.Facts.KVCacheTokens; tokens > 0 {
		room = worstFill * float64(tokens)
	}
	var chosen []workload.Request
	asked := 0
	for i := 0; len(chosen) < w.setting("max-num-seqs", defaultSeqs) && (i == 0 || float64(asked) < room); i++ {
		q := candidates[i%len(candidates)]
		chosen = append(chosen, q)
		asked += promptTokens(&q)
	}
	steps := worstMinAnswer + asked/w.setting("max-num-batched-tokens", defaultBatch)
	for i := range chosen {
		chosen[i].OutputTokens = min(chosen[i].OutputTokens, steps)
	}
	longestFirst(chosen)
	return chosen
}

// longestPrompts returns up to worstScan requests of the workload, the longest prompt first. They come from a draw (one
// set of random requests) that no probe uses.
func longestPrompts(source workload.Source) []workload.Request {
	n := worstScan
	if all := source.Len(); all > 0 {
		n = min(n, all)
	}
	requests := make([]workload.Request, n)
	for i := range requests {
		requests[i] = *source.Request(workload.WarmUpStream.Draw(1), i)
	}
	longestFirst(requests)
	return requests
}

func longestFirst(requests []workload.Request) {
	slices.SortStableFunc(requests, func(a, b workload.Request) int { return cmp.Compare(promptTokens(&b), promptTokens(&a)) })
}

// promptTokens returns the length of a prompt in tokens. It estimates the length if only the server can count the
// tokens.
func promptTokens(q *workload.Request) int {
	if q.PromptTokens > 0 {
		return q.PromptTokens
	}
	return 1 + q.TextBytes()/charsPerToken
}

// atOnce returns a load whose requests are all due at its start.
func atOnce(requests []workload.Request) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for i := range requests {
			if !yield(workload.Arrival{Phase: workload.Window, Index: i, Request: &requests[i]}) {
				return
			}
		}
	}
}
