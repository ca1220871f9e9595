package vllm

import (
	"fmt"
	"math"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// stats are the counters of vLLM's API server (vllm/v1/metrics/stats.py and loggers.py, 0.14.1 to 0.33.0). A token
// counts when the API server delivers it. Intervals are in seconds.
type stats struct {
	since time.Time // when counting began
	lines []string  // /metrics without values

	promptTokens, cachedTokens, generationTokens int
	finished                                     int // number of answers that have all their tokens

	histograms map[string]*histogram // by name; one for each histogram in the field lines
}

// lengthHistogram matches the names of histograms whose bounds depend on the length of the longest request.
var lengthHistogram = regexp.MustCompile(`^vllm:request_\w*tokens$`)

func newStats(o sim.Options) *stats {
	s := &stats{since: time.Now(), lines: metricLines(o), histograms: map[string]*histogram{}}
	bounds := map[string][]float64{}
	for _, line := range s.lines {
		if name, bound, ok := parseBucket(line); ok {
			bounds[name] = append(bounds[name], bound)
		}
	}
	for name, list := range bounds {
		if lengthHistogram.MatchString(name) {
			list = tokenBounds(o.MaxModelLen)
		}
		s.histograms[name] = &histogram{bounds: list, counts: make([]uint64, len(list)+1)}
	}
	return s
}

// parseBucket returns the name of the histogram and the upper bound, if the line is a bucket with a finite bound.
func parseBucket(line string) (name string, bound float64, ok bool) {
	name, labels, _ := strings.Cut(line, "_bucket{")
	_, after, _ := strings.Cut(labels, `,le="`)
	text, _, _ := strings.Cut(after, `"`)
	bound, err := strconv.ParseFloat(text, 64)
	return name, bound, err == nil && !math.IsInf(bound, 1)
}

// observe counts a value in a histogram, if the version has it.
func (s *stats) observe(name string, v float64) {
	if h := s.histograms["vllm:"+name]; h != nil {
		h.counts[sort.SearchFloat64s(h.bounds, v)]++
		h.sum += v
	}
}

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

// step counts the progress of one step, for the sequences whose clients still wait. The parameter seenAt is the time
// when the clients get the tokens, in seconds of the engine's clock.
func (s *stats) step(d delivery, open map[*sim.Request]*sequence, seenAt float64) {
	tokens := 0
	for _, u := range d.to {
		q := u.sequence
		if open[q.request] != q { // the client has disconnected
			continue
		}
		tokens += u.tokens
		s.generationTokens += u.tokens
		if q.first == 0 {
			tokens += q.request.Prompt
			s.promptTokens += q.request.Prompt
			s.cachedTokens += q.request.Cached
			s.observe("time_to_first_token_seconds", seenAt-q.arrived)
			q.first = d.end
		} else {
			s.observe("inter_token_latency_seconds", d.end-q.last)
		}
		q.last = d.end
		if u.last {
			s.finish(q, seenAt)
		}
	}
	if tokens > 0 {
		s.observe("iteration_tokens_total", float64(tokens))
	}
}

// finish counts a request that has all its tokens.
func (s *stats) finish(q *sequence, seenAt float64) {
	r := q.request
	s.finished++
	s.observe("request_prompt_tokens", float64(r.Prompt))
	s.observe("request_generation_tokens", float64(r.Output))
	s.observe("request_params_max_tokens", float64(r.Output))
	s.observe("request_prefill_kv_computed_tokens", float64(r.Prompt-r.Cached))
	s.observe("e2e_request_latency_seconds", seenAt-q.arrived)
	s.observe("request_queue_time_seconds", q.scheduled-q.queued)
	s.observe("request_inference_time_seconds", q.last-q.scheduled)
	s.observe("request_prefill_time_seconds", q.first-q.scheduled)
	s.observe("request_decode_time_seconds", q.last-q.first)
	s.observe("request_time_per_output_token_seconds", (q.last-q.first)/float64(max(1, r.Output-1)))
	s.observe("request_num_preemptions", float64(r.Preempted))
	q.group.left--
	q.group.longest = max(q.group.longest, r.Output)
	if q.group.left == 0 {
		s.observe("request_params_n", float64(q.group.n))
		s.observe("request_max_num_generation_tokens", float64(q.group.longest))
	}
}

// A histogram counts values in buckets. Each bucket includes its upper bound.
type histogram struct {
	bounds []float64
	counts []uint64 // one more than bounds: the last bucket has no upper bound
	sum    float64
}

// write writes the histogram's samples. The parameter model is the label with the model's name.
func (h *histogram) write(b *strings.Builder, name, model string) {
	var count uint64
	for i, n := range h.counts {
		count += n
		bound := math.Inf(1)
		if i < len(h.bounds) {
			bound = h.bounds[i]
		}
		fmt.Fprintf(b, "%s_bucket{engine=\"0\",le=\"%s\",%s} %s\n", name, pythonFloat(bound), model, pythonFloat(float64(count)))
	}
	fmt.Fprintf(b, "%s_count{engine=\"0\",%s} %s\n", name, model, pythonFloat(float64(count)))
	fmt.Fprintf(b, "%s_sum{engine=\"0\",%s} %s\n", name, model, pythonFloat(h.sum))
}
