package bench

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"vllmtuner/foreign"
)

// A VLLMMeta describes a run in the result of vllm bench serve.
type VLLMMeta struct {
	Date           time.Time
	Backend        string // openai or openai-chat
	Label          string // "" is written as null
	Model          string
	Tokenizer      string            // "" means the tokenizer of the model
	Prompts        int               // planned requests
	Rate           float64           // requests per second; 0 or infinite is written as "inf"
	Burstiness     float64           // burstiness of the arrivals: 1 is Poisson; infinite means constant gaps and is written as "inf"
	MaxConcurrency int               // 0 is written as null
	Metadata       map[string]string // from --metadata KEY=VALUE
	Workload       string            // description of the workload; if it is empty, the result has no workload, seed or natural
	Seed           uint64            // seed of the workload
	Natural        bool              // the lengths of answers were not pinned (fixed by the requests)
}

// A VLLMResult is a measurement in the format of vllm bench serve --save-result: a flat JSON object. Names, units and
// the choice of requests are as in the functions main_async and benchmark of vllm/benchmarks/serve.py (0.14.1, 0.32 and
// 0.33). The last fields are our own, with names that vLLM does not use. vllm bench sweep plot and plot_pareto
// (vllm/benchmarks/sweep) read lists of such objects from files called summary.json.
type VLLMResult struct{ fields []vllmField }

type vllmField struct {
	key   string
	value any
}

const vllmDate = "20060102-150405"

// vllmPercentiles are the percentiles in a Stats.
var vllmPercentiles = []float64{50, 90, 95, 99, 99.9}

// percentile returns the field that holds the percentile p, or nil if p is not in vllmPercentiles.
func (s *Stats) percentile(p float64) *float64 {
	return map[float64]*float64{50: &s.P50, 90: &s.P90, 95: &s.P95, 99: &s.P99, 99.9: &s.P999}[p]
}

// vllmKey returns the key of a percentile, such as p99_ttft_ms or p99.9_ttft_ms.
func vllmKey(p float64, metric string) string {
	return "p" + strconv.FormatFloat(p, 'g', -1, 64) + "_" + metric + "_ms"
}

// NewVLLMResult returns the result of a measurement. If samples is not nil, it holds the counted samples, and the
// result has the lists of --save-detailed. Otherwise the result has no lists. A metadata key that is also a field of
// the result is an error. In vLLM, one of the two values silently replaces the other.
func NewVLLMResult(m Measurement, meta VLLMMeta, samples []Sample) (VLLMResult, error) {
	var r VLLMResult
	r.head(meta)
	r.body(&m, samples)
	if meta.Workload != "" {
		r.add("workload", meta.Workload)
		r.add("seed", meta.Seed)
		r.add("natural", meta.Natural)
	}
	seen := make(map[string]bool, len(r.fields))
	for _, f := range r.fields {
		if _, given := meta.Metadata[f.key]; given && seen[f.key] {
			return VLLMResult{}, fmt.Errorf("metadata key %q is a field of vLLM's result: choose another", f.key)
		}
		seen[f.key] = true
	}
	return r, nil
}

func (r *VLLMResult) add(key string, value any) { r.fields = append(r.fields, vllmField{key, value}) }

// orNull returns the value. If there is no value (exists is false), orNull returns nil, which becomes null in JSON.
func orNull(exists bool, value any) any {
	if !exists {
		return nil
	}
	return value
}

// orInf returns the number n. An infinite number becomes the text "inf", as in vLLM, because JSON has no infinity.
func orInf(n float64) any {
	if math.IsInf(n, 1) {
		return "inf"
	}
	return n
}

// head adds the fields that the function main_async of vLLM writes.
func (r *VLLMResult) head(meta VLLMMeta) {
	rate := meta.Rate
	if rate <= 0 {
		rate = math.Inf(1)
	}
	r.add("date", meta.Date.Format(vllmDate))
	r.add("endpoint_type", meta.Backend)
	r.add("backend", meta.Backend)
	r.add("label", orNull(meta.Label != "", meta.Label))
	r.add("model_id", meta.Model)
	r.add("tokenizer_id", cmp.Or(meta.Tokenizer, meta.Model))
	r.add("num_prompts", meta.Prompts)
	for _, key := range slices.Sorted(maps.Keys(meta.Metadata)) {
		r.add(key, meta.Metadata[key])
	}
	r.add("request_rate", orInf(rate))
	r.add("burstiness", orInf(meta.Burstiness))
	r.add("max_concurrency", orNull(meta.MaxConcurrency > 0, meta.MaxConcurrency))
}

// body adds the fields that the function benchmark of vLLM writes, and then the fields that vLLM does not have.
func (r *VLLMResult) body(m *Measurement, samples []Sample) {
	r.add("duration", m.Duration.Seconds())
	r.add("completed", m.Completed)
	r.add("failed", m.Failed)
	r.add("total_input_tokens", m.PromptTokens)
	r.add("total_output_tokens", m.OutputTokens)
	r.add("request_throughput", m.RequestThroughput)
	r.add("request_goodput", orNull(len(m.Over) > 0, m.Goodput))
	r.add("output_throughput", m.OutputThroughput)
	r.add("total_token_throughput", m.TotalThroughput)
	if samples != nil {
		r.details(samples, m.Rules)
	}
	r.add("max_output_tokens_per_s", float64(m.PeakChunks))
	r.add("max_concurrent_requests", m.PeakInFlight)
	r.add("rtfx", 0.0)
	r.stats("ttft", m.TTFT, m)
	r.stats("tpot", m.TPOT, m)
	if m.ITL.N > 0 { // vLLM always writes this metric, but a zero would look like a latency
		r.stats("itl", m.ITL, m)
	}
	r.stats("e2el", m.E2E, m)
	if m.Queue.N > 0 {
		r.stats("client_queue_time", m.Queue, m)
	}

	r.stats("send_lag", m.SendLag, m)
	r.add("window", m.Window.Seconds())
	// Both throughputs are 0 if the window has no whole second.
	r.add("window_request_throughput", orNull(m.WindowRequestThroughput > 0, m.WindowRequestThroughput))
	r.add("window_output_throughput", orNull(m.WindowOutputThroughput > 0, m.WindowOutputThroughput))
	r.add("mean_in_flight", m.MeanInFlight)
	r.add("failures", m.Failures)
	r.add("off_plan", m.OffPlan)
	r.add("void", m.Void)
}

// stats adds one metric. If no request was completed, vLLM writes 0 ms. That would be within every limit, so this
// method writes null.
func (r *VLLMResult) stats(metric string, s Stats, m *Measurement) {
	completed := m.Completed > 0
	r.add("mean_"+metric+"_ms", orNull(completed, s.Mean))
	r.add("median_"+metric+"_ms", orNull(completed, s.P50))
	r.add("std_"+metric+"_ms", orNull(completed, s.Std))
	for _, p := range vllmPercentiles {
		r.add(vllmKey(p, metric), orNull(completed, *s.percentile(p)))
	}
}

// details adds one list for each property of a request. Times are in seconds. A request that did not end well has zero
// output and latencies, and its failure is in the list errors. The list start_times holds the due times of requests,
// because latencies count from the due times.
func (r *VLLMResult) details(samples []Sample, rules Rules) {
	n := len(samples)
	input, output := make([]int, n), make([]int, n)
	ttfts, latencies, starts := make([]float64, n), make([]float64, n), make([]float64, n)
	itls, problems := make([][]float64, n), make([]string, n)
	for i := range samples {
		s := &samples[i]
		input[i], starts[i], itls[i] = s.PromptTokens, s.Due.Seconds(), []float64{}
		if !s.OK() {
			problems[i] = s.problem()
			continue
		}
		output[i], ttfts[i], latencies[i] = s.OutputTokens, rules.ttft(s).Seconds(), rules.e2e(s).Seconds()
		for _, gap := range s.Gaps {
			itls[i] = append(itls[i], gap.Seconds())
		}
	}
	r.add("input_lens", input)
	r.add("output_lens", output)
	r.add("ttfts", ttfts)
	r.add("itls", itls)
	r.add("latencies", latencies)
	r.add("start_times", starts)
	r.add("errors", problems)
}

// problem says in one line why a request did not end well.
func (s *Sample) problem() string {
	switch {
	case s.Failure == "":
		return "withdrawn before it ended"
	case s.Detail == "":
		return string(s.Failure)
	}
	return string(s.Failure) + ": " + s.Detail
}

// MarshalJSON writes the fields in vLLM's order.
func (r VLLMResult) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, f := range r.fields {
		if i > 0 {
			b.WriteByte(',')
		}
		key, err := foreign.JSON(f.key, "", "")
		if err != nil {
			return nil, err
		}
		value, err := foreign.JSON(f.value, "", "")
		if err != nil {
			return nil, fmt.Errorf("field %s: %w", f.key, err)
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}
