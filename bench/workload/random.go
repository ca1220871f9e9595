package workload

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// The lengths of vllm bench serve's random data set (0.14.1 and 0.33).
const (
	defaultInputTokens  = 1024
	defaultOutputTokens = 128
)

// randomEpoch is how many random requests are drawn at once: few enough for long prompts, enough to be used again.
const randomEpoch = 64

// openRandom returns requests of random token ids that share no prefix. Unlike vllm bench serve, which sends runs of
// consecutive ids, each id is drawn by itself.
func openRandom(spec Spec, seed uint64) (Source, error) {
	if spec.InputTokens == 0 {
		spec.InputTokens = defaultInputTokens
	}
	if spec.OutputTokens == 0 {
		spec.OutputTokens = defaultOutputTokens
	}
	name := fmt.Sprintf("random %d/%d", spec.InputTokens, spec.OutputTokens)
	if spec.RangeRatio > 0 {
		name += fmt.Sprintf(" ±%g %%", 100*spec.RangeRatio)
	}
	if spec.Requests > 0 {
		requests := spec.randomRequests(chance(seed, randomDraws, 0, 0), spec.Requests)
		return newFinite(fmt.Sprintf("%s (%d requests)", name, spec.Requests), seed, requests), nil
	}
	_, input := spread(spec.InputTokens, spec.RangeRatio)
	_, output := spread(spec.OutputTokens, spec.RangeRatio)
	return &endless{
		name: name + " (endless)", size: randomEpoch, longest: input + output,
		draw: func(stream Stream, epoch int) []Request {
			return spec.randomRequests(chance(seed, randomDraws, stream, epoch), randomEpoch)
		},
	}, nil
}

func (s Spec) randomRequests(r *rand.Rand, n int) []Request {
	requests := make([]Request, n)
	for i := range requests {
		ids := make([]int32, uniform(r, s.InputTokens, s.RangeRatio))
		fill(r, ids, s.VocabSize)
		requests[i] = Request{
			Tokens: ids, PromptTokens: len(ids), OutputTokens: uniform(r, s.OutputTokens, s.RangeRatio), Conversation: -1,
		}
	}
	return requests
}

func uniform(r *rand.Rand, length int, ratio float64) int {
	low, high := spread(length, ratio)
	return low + r.IntN(high-low+1)
}

// spread returns the smallest and the largest length, as vllm bench serve's random data set has it
// (vllm/benchmarks/datasets.py, 0.14.1).
func spread(length int, ratio float64) (low, high int) {
	low = int(math.Floor(float64(length) * (1 - ratio)))
	high = int(math.Ceil(float64(length) * (1 + ratio)))
	return max(1, low), max(1, high)
}
