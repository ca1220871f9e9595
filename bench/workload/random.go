package workload

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"

	"vllmtuner/render"
)

// The default lengths of vllm bench serve's random and prefix_repetition data sets, and the default number of prefixes
// (vllm/benchmarks/datasets, 0.14.1 and 0.33).
const (
	defaultInputTokens  = 1024
	defaultOutputTokens = 128
	defaultPrefixTokens = 256
	defaultSuffixTokens = 256
	defaultPrefixes     = 10
)

// randomEpoch is how many random requests are drawn at once. A larger epoch would take much memory with long prompts.
// With a smaller epoch, the same requests would be drawn again too often.
const randomEpoch = 64

// A shape describes requests of random token ids. Each request begins with one of the prefixes. Its own ids follow.
// Each id is drawn independently. vllm bench serve sends runs of consecutive ids instead.
type shape struct {
	seed     uint64
	vocab    int
	prefixes int // number of different prefixes
	prefix   int // tokens of a prefix

	own, answer             int // mean tokens after the prefix, and mean tokens of the answer
	ownSpread, answerSpread float64
}

// openDrawn returns requests of random token ids.
func openDrawn(spec Spec, seed uint64) Source {
	s, name := spec.shape(seed)
	if n := spec.Requests; n > 0 {
		requests := s.requests(chance(seed, randomDraws, 0, 0), n, true)
		return newFinite(spec.title(name, render.Count(n, "request")), spec, seed, requests)
	}
	_, own := spread(s.own, s.ownSpread)
	_, answer := spread(s.answer, s.answerSpread)
	return &endless{
		name: spec.title(name, "endless"), size: randomEpoch, longest: s.prefix + own + answer,
		draw: func(stream Stream, epoch int) []Request {
			return s.requests(chance(seed, randomDraws, stream, epoch), randomEpoch, false)
		},
	}
}

// shape returns the shape of the requests and the name of the source.
func (s Spec) shape(seed uint64) (shape, string) {
	d := shape{
		seed: seed, vocab: s.VocabSize, prefixes: 1, prefix: s.PrefixTokens,
		own: cmp.Or(s.InputTokens, defaultInputTokens), answer: cmp.Or(s.OutputTokens, defaultOutputTokens),
		ownSpread: s.RangeRatio + s.InputRangeRatio, answerSpread: s.RangeRatio + s.OutputRangeRatio, // in each sum at least one ratio is zero
	}
	name := fmt.Sprintf("%s %d/%d", s.Kind, d.own, d.answer)
	switch s.Kind {
	case "random":
		if d.prefix > 0 {
			name = fmt.Sprintf("random %d+%d/%d", d.prefix, d.own, d.answer)
		}
	case "prefix-repetition":
		d.prefixes = cmp.Or(s.Prefixes, defaultPrefixes)
		d.prefix, d.own = cmp.Or(s.PrefixTokens, defaultPrefixTokens), cmp.Or(s.SuffixTokens, defaultSuffixTokens)
		name = fmt.Sprintf("prefix-repetition %d × %d+%d/%d", d.prefixes, d.prefix, d.own, d.answer)
	case "shared-prefix":
		// The prefix is computed as in auto_tune.sh: INPUT_LEN * MIN_CACHE_HIT_PCT / 100, in whole tokens (0.14.1 and 0.33).
		d.prefixes = cmp.Or(s.Groups, 1)
		d.prefix = min(int(float64(d.own)*s.HitPercent/100), d.own-1)
		d.own -= d.prefix
		name += fmt.Sprintf(", %g %% shared in groups: %d", s.HitPercent, d.prefixes)
	}
	switch {
	case d.ownSpread == d.answerSpread && d.ownSpread > 0:
		name += fmt.Sprintf(" ±%g %%", 100*d.ownSpread)
	case d.ownSpread != d.answerSpread:
		name += fmt.Sprintf(" ±%g/%g %%", 100*d.ownSpread, 100*d.answerSpread)
	}
	return d, name
}

// requests draws n requests. If inTurn is true, the requests use the prefixes one after the other, because vllm bench
// serve uses each prefix equally often. Otherwise each request gets a random prefix.
func (s shape) requests(r *rand.Rand, n int, inTurn bool) []Request {
	requests := make([]Request, n)
	for i := range requests {
		which := i % s.prefixes
		if !inTurn && s.prefixes > 1 {
			which = r.IntN(s.prefixes)
		}
		ids := make([]int32, s.prefix+uniform(r, s.own, s.ownSpread))
		fill(chance(s.seed, prefixDraws, 0, which), ids[:s.prefix], s.vocab)
		fill(r, ids[s.prefix:], s.vocab)
		requests[i] = Request{
			Tokens: ids, PromptTokens: len(ids), OutputTokens: uniform(r, s.answer, s.answerSpread), Conversation: -1,
		}
	}
	return requests
}

func uniform(r *rand.Rand, length int, ratio float64) int {
	low, high := spread(length, ratio)
	return low + r.IntN(high-low+1)
}

// spread returns the smallest and the largest length for a mean length and a range ratio. It follows vllm bench serve's
// random data set (vllm/benchmarks/datasets.py, 0.14.1).
func spread(length int, ratio float64) (low, high int) {
	low = int(math.Floor(float64(length) * (1 - ratio)))
	high = int(math.Ceil(float64(length) * (1 + ratio)))
	return max(1, low), max(1, high)
}
