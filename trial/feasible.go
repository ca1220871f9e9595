package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl"
)

const (
	// worstLimit is how long the worst case may last: what it asks for at most is in the server long before, or never.
	worstLimit = time.Minute
	// worstFill is how much of the KV cache the worst case asks for, so that requests are preempted or wait.
	worstFill = 1.25
	// worstScan is among how many of the workload's requests the longest are looked for.
	worstScan = 1000
	// Of servers that do not say: vLLM's largest default of max-num-seqs, and its smallest of max-num-batched-tokens
	// (get_batch_defaults in vllm/engine/arg_utils.py, 0.14.1).
	usualSeqs, usualBatch = 1024, 2048
	// charsPerToken is what English text has; only where the server alone can count.
	charsPerToken = 4
)

// learn takes in what a probe has shown of the server, and ends the trial where that is enough.
func (m *measuring) learn(p Probe) error {
	running := 0.0
	if p.Server != nil && len(p.Server.Running) > 0 {
		running = slices.Max(p.Server.Running)
	}
	// Preempted is only who holds blocks when there are no others, so that the cache was full.
	m.worstShown = m.worstShown || p.Preemptions > 0 || running >= float64(m.setting("max-num-seqs", usualSeqs))
	return m.judgeDrafts(p.Speculation)
}

// setting is what a flag of the server came to: as the server says it, as its args do, or else as usual.
func (m *measuring) setting(flag string, usual int) int {
	texts := []string{m.result.Facts.Args[flag]}
	for i, arg := range m.Args {
		name, value, joined := strings.Cut(arg, "=")
		if strings.ReplaceAll(name, "_", "-") != "--"+flag {
			continue
		}
		if !joined && i+1 < len(m.Args) {
			value = m.Args[i+1]
		}
		texts = append(texts, value)
	}
	for _, text := range texts {
		if n, err := strconv.Atoi(text); err == nil && n > 0 {
			return n
		}
	}
	return usual
}

// surviveWorstCase sends as many requests at once as the server was started for, with the longest prompts of the workload, unless a probe
// has shown it under such a load. A point counts only if its server survives that. Nothing of it is stored: when it was interrupted, or a
// trial is resumed, it is done again.
func (m *measuring) surviveWorstCase(ctx context.Context) error {
	if !m.WorstCase || m.worstShown {
		return nil
	}
	requests := m.worstCase()
	longest, shortest := promptTokens(&requests[0]), promptTokens(&requests[len(requests)-1])
	what := fmt.Sprintf("%s at once with prompts of %d to %d tokens", render.Count(len(requests), "request"), shortest, longest)
	m.progress("worst case: %s", what)
	endSeries := m.server.Observe(time.Now())
	before := m.result.GPUTime
	run, err := m.uncounted(ctx, atOnce(requests), func(now time.Duration, _ []bench.Sample) bool { return now >= worstLimit }, "of the worst case")
	series := endSeries()
	if err = m.cause(ctx, err); err != nil {
		if exit, ok := errors.AsType[*serverctl.ExitError](err); ok {
			died := *exit
			died.Evidence = join(died.Evidence, "it had lived through its search, and died under "+what)
			return &died
		}
		return err
	}
	text := fmt.Sprintf("the server survived %s after the search", what)
	if series != nil && len(series.Running) > 0 {
		text += fmt.Sprintf(", %.0f of which were seen to run at a time", slices.Max(series.Running))
	}
	if run.Stopped {
		text += fmt.Sprintf(", not all answered within %s", worstLimit)
	}
	m.result.Notes = append(m.result.Notes, fmt.Sprintf("%s (%.0f s)", text, (m.result.GPUTime-before).Seconds()))
	return nil
}

// worstCase returns the requests with the longest prompts first: as many as may run at a time, or as fill the KV cache and more. Their
// answers are short, and so long that the first still runs when the last is taken in.
func (m *measuring) worstCase() []workload.Request {
	n := worstScan
	if all := m.Source.Len(); all > 0 {
		n = min(n, all)
	}
	stream := workload.WarmUpStream.Draw(1) // no probe asks these
	candidates := make([]workload.Request, n)
	for i := range candidates {
		candidates[i] = *m.Source.Request(stream, i)
	}
	slices.SortStableFunc(candidates, func(a, b workload.Request) int { return cmp.Compare(promptTokens(&b), promptTokens(&a)) })
	room := math.Inf(1)
	if tokens := m.result.Facts.KVCacheTokens; tokens > 0 {
		room = worstFill * float64(tokens)
	}
	var chosen []workload.Request
	asked := 0
	for i := 0; len(chosen) < m.setting("max-num-seqs", usualSeqs) && (i == 0 || float64(asked) < room); i++ {
		q := candidates[i%n]
		chosen = append(chosen, q)
		asked += promptTokens(&q)
	}
	const least = 16
	steps := least + asked/m.setting("max-num-batched-tokens", usualBatch)
	for i := range chosen {
		chosen[i].OutputTokens = min(chosen[i].OutputTokens, steps)
	}
	slices.SortStableFunc(chosen, func(a, b workload.Request) int { return cmp.Compare(promptTokens(&b), promptTokens(&a)) })
	return chosen
}

// promptTokens is the length of a prompt, estimated where only the server can count.
func promptTokens(q *workload.Request) int {
	if q.PromptTokens > 0 {
		return q.PromptTokens
	}
	return 1 + q.TextBytes()/charsPerToken
}

// atOnce is a load whose requests are all due when it begins.
func atOnce(requests []workload.Request) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for i := range requests {
			if !yield(workload.Arrival{Phase: workload.Window, Index: i, Request: &requests[i]}) {
				return
			}
		}
	}
}
