package vllm

import (
	"sort"
	"time"

	"vllmtuner/serverctl/sim"
)

// stats are the counters of vLLM's API server (vllm/v1/metrics/stats.py and loggers.py, 0.14.1 to 0.33.0). It counts
// tokens when it delivers them. Intervals are in seconds.
type stats struct {
	since time.Time // when counting began

	promptTokens, cachedTokens, generationTokens int
	finished                                     int // answers with all their tokens

	requestPromptTokens, requestGenerationTokens, longestGeneration, maxTokens, prefillComputed *histogram // tokens
	iterationTokens                                                                             *histogram // tokens of each step
	answers                                                                                     *histogram // n
	firstToken, interToken, perOutputToken                                                      *histogram
	endToEnd, queue, inference, prefill, decode                                                 *histogram
	preemptions                                                                                 *histogram // of each request
}

// Upper bounds of the buckets (vllm/v1/metrics/loggers.py, 0.14.1; vllm/v1/metrics/buckets.py, 0.32.0 and 0.33.0).
var (
	iterationBounds  = []float64{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384}
	answersBounds    = []float64{1, 2, 5, 10, 20}
	firstTokenBounds = []float64{0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	interTokenBounds = []float64{0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	latencyBounds    = []float64{0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	preemptionBounds = []float64{1, 2, 3, 4, 5, 10, 20} // since 0.32.0
)

// tokenBounds returns the bounds 1, 2, 5, 10 … up to the length of the longest request.
func tokenBounds(longest int) (bounds []float64) {
	for decade := 1; ; decade *= 10 {
		for _, digit := range []int{1, 2, 5} {
			if digit*decade > longest {
				return bounds
			}
			bounds = append(bounds, float64(digit*decade))
		}
	}
}

func newStats(maxModelLen int) *stats {
	tokens := tokenBounds(maxModelLen)
	return &stats{
		since:               time.Now(),
		requestPromptTokens: newHistogram(tokens), requestGenerationTokens: newHistogram(tokens), longestGeneration: newHistogram(tokens),
		maxTokens: newHistogram(tokens), prefillComputed: newHistogram(tokens),
		iterationTokens: newHistogram(iterationBounds), answers: newHistogram(answersBounds),
		firstToken: newHistogram(firstTokenBounds), interToken: newHistogram(interTokenBounds), perOutputToken: newHistogram(interTokenBounds),
		endToEnd: newHistogram(latencyBounds), queue: newHistogram(latencyBounds), inference: newHistogram(latencyBounds),
		prefill: newHistogram(latencyBounds), decode: newHistogram(latencyBounds),
		preemptions: newHistogram(preemptionBounds),
	}
}

// step counts the progress of one step, for the sequences whose clients still wait. seen is the time when the clients
// get the tokens, in seconds of the engine's clock.
func (s *stats) step(d delivery, open map[*sim.Request]*sequence, seen float64) {
	tokens := 0
	for _, to := range d.to {
		q := to.sequence
		if open[q.request] != q { // the client has disconnected
			continue
		}
		tokens += to.progress.tokens
		s.generationTokens += to.progress.tokens
		if q.first == 0 {
			tokens += q.request.Prompt
			s.promptTokens += q.request.Prompt
			s.cachedTokens += q.request.Cached
			s.firstToken.observe(seen - q.arrived)
			q.first = d.end
		} else {
			s.interToken.observe(d.end - q.last)
		}
		q.last = d.end
		if to.progress.last {
			s.finish(q, seen)
		}
	}
	if tokens > 0 {
		s.iterationTokens.observe(float64(tokens))
	}
}

// finish counts a request that has all its tokens.
func (s *stats) finish(q *sequence, seen float64) {
	r := q.request
	s.finished++
	s.requestPromptTokens.observe(float64(r.Prompt))
	s.requestGenerationTokens.observe(float64(r.Output))
	s.maxTokens.observe(float64(r.Output))
	s.prefillComputed.observe(float64(r.Prompt - r.Cached))
	s.endToEnd.observe(seen - q.arrived)
	s.queue.observe(q.scheduled - q.queued)
	s.inference.observe(q.last - q.scheduled)
	s.prefill.observe(q.first - q.scheduled)
	s.decode.observe(q.last - q.first)
	s.perOutputToken.observe((q.last - q.first) / float64(max(1, r.Output-1)))
	s.preemptions.observe(float64(r.Preempted))
	q.group.left--
	q.group.longest = max(q.group.longest, r.Output)
	if q.group.left == 0 {
		s.answers.observe(float64(q.group.n))
		s.longestGeneration.observe(float64(q.group.longest))
	}
}

// A histogram counts values in buckets. Each bucket includes its upper bound.
type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds: the last bucket has no upper bound
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(v float64) {
	h.counts[sort.SearchFloat64s(h.bounds, v)]++
	h.sum += v
}
