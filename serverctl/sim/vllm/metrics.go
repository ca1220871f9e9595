package vllm

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/serverctl/sim"
)

// metrics answers with all metrics of vLLM (vllm/v1/metrics/loggers.py, 0.14.1 to 0.33.0). As in vLLM there are none
// with --disable-log-stats.
func (a *api) metrics(w http.ResponseWriter, _ *http.Request) {
	e := &exposition{}
	a.live.with(func(engine *sim.Engine) {
		e.created = float64(a.live.stats.since.UnixNano()) / 1e9
		if o := engine.Options; !o.NoStats {
			m := metrics{exposition: e, release: releaseOf(o), engine: engine, stats: a.live.stats, labels: []string{"model_name", o.Model, "engine", "0"}}
			m.write()
		}
	})
	w.Header().Set("Content-Type", metricsType)
	_, _ = w.Write(e.buf.Bytes()) // fails when the client has disconnected
}

// metricsType is the content type of prometheus_client 0.26, with which all versions were recorded.
const metricsType = "text/plain; version=1.0.0; charset=utf-8"

// metrics writes the families in vLLM's order.
type metrics struct {
	*exposition
	release *release
	engine  *sim.Engine
	stats   *stats
	labels  []string // the labels that nearly all samples have
}

// one returns a sample with the common labels and the given ones.
func (m *metrics) one(v float64, labels ...string) sample {
	return sample{labels: slices.Concat(m.labels, labels), value: v}
}

func (m *metrics) write() {
	m.speculation()
	if m.release.since032 {
		m.zero("vllm:estimated_flops_per_gpu", "Estimated number of floating point operations per GPU (for Model Flops Utilization calculations).")
		m.zero("vllm:estimated_read_bytes_per_gpu", "Estimated number of bytes read from memory per GPU (for Model Flops Utilization calculations).")
		m.zero("vllm:estimated_write_bytes_per_gpu", "Estimated number of bytes written to memory per GPU (for Model Flops Utilization calculations).")
	}
	m.state()
	m.caches()
	m.tokens()
	m.requests()
	m.intervals()
	m.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", sample{labels: m.cacheConfig(), value: 1})
}

// zero writes a counter of 0, for a feature that is not simulated.
func (m *metrics) zero(name, help string) { m.counter(name, help, m.one(0)) }

// speculation writes the counters of speculative decoding, which exist only with speculative decoding
// (vllm/v1/spec_decode/metrics.py).
func (m *metrics) speculation() {
	t := m.engine.Totals
	if len(t.AcceptedPerPos) == 0 {
		return
	}
	m.counter("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", m.one(float64(t.Drafts)))
	m.counter("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", m.one(float64(t.DraftTokens)))
	m.counter("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", m.one(float64(t.AcceptedTokens)))
	var positions []sample
	for i, n := range t.AcceptedPerPos {
		positions = append(positions, m.one(float64(n), "position", strconv.Itoa(i)))
	}
	m.counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position.", positions...)
}

// state writes the gauges. The simulated engine never sleeps.
func (m *metrics) state() {
	waiting := float64(m.engine.Waiting())
	m.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", m.one(float64(m.engine.Running())))
	m.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", m.one(waiting))
	if m.release.since032 {
		m.gauge("vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "+
			"'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting.",
			m.one(waiting, "reason", "capacity"), m.one(0, "reason", "deferred"))
	}
	m.gauge("vllm:engine_sleep_state", "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "+
		"weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2.",
		m.one(1, "sleep_state", "awake"), m.one(0, "sleep_state", "weights_offloaded"), m.one(0, "sleep_state", "discard_all"))
	m.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", m.one(m.engine.KVUsage()))
}

// caches writes the counters of the prefix cache, zeros for the caches that are not simulated, and the preemptions.
func (m *metrics) caches() {
	t := m.engine.Totals
	m.counter("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", m.one(float64(t.PrefixQueries)))
	m.counter("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", m.one(float64(t.PrefixHits)))
	m.zero("vllm:external_prefix_cache_queries", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.")
	m.zero("vllm:external_prefix_cache_hits", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.")
	m.zero("vllm:mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.")
	m.zero("vllm:mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.")
	m.counter("vllm:num_preemptions", "Cumulative number of preemption from the engine.", m.one(float64(t.Preemptions)))
}

// tokens writes the counters of the API server.
func (m *metrics) tokens() {
	s := m.stats
	m.counter("vllm:prompt_tokens", "Number of prefill tokens processed.", m.one(float64(s.promptTokens)))
	if m.release.since032 {
		cached := float64(s.cachedTokens)
		m.counter("vllm:prompt_tokens_by_source", "Number of prompt tokens by source.", m.one(float64(s.promptTokens)-cached, "source", "local_compute"),
			m.one(cached, "source", "local_cache_hit"), m.one(0, "source", "external_kv_transfer"))
		m.counter("vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", m.one(cached))
		m.counter("vllm:prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them: device (local HBM), host (offloaded to DRAM), "+
			"disk, p2p (transferred from another vLLM instance) or external_unspecified. Counted at admission; sums to vllm:prefix_cache_hits + vllm:external_prefix_cache_hits.",
			m.one(float64(m.engine.Totals.PrefixHits), "source", "device"), m.one(0, "source", "host"), m.one(0, "source", "p2p"),
			m.one(0, "source", "disk"), m.one(0, "source", "external_unspecified"))
	}
	m.counter("vllm:generation_tokens", "Number of generation tokens processed.", m.one(float64(s.generationTokens)))
	reasons := []string{"stop", "length", "abort", "error"}
	if m.release.since032 {
		reasons = append(reasons, "repetition")
	}
	var ends []sample
	for _, reason := range reasons {
		n := 0
		if reason == "length" { // the simulated model never ends an answer by itself
			n = s.finished
		}
		ends = append(ends, m.one(float64(n), "finished_reason", reason))
	}
	m.counter("vllm:request_success", "Count of successfully processed requests.", ends...)
	if m.release.since032 {
		model := m.labels[:2] // without the label engine: vLLM rejects a request before it chooses an engine
		m.counter("vllm:admission_rejections", "Number of admission attempts rejected by a queue limit, by reason.",
			sample{labels: slices.Concat(model, []string{"reason", "max_num_queued_reqs"})}, sample{labels: slices.Concat(model, []string{"reason", "max_num_queued_tokens"})})
	}
}

// A namedHistogram is a histogram with its name and help text.
type namedHistogram struct {
	name, help string
	h          *histogram
}

func (m *metrics) histograms(list []namedHistogram) {
	for _, h := range list {
		m.histogram(h.name, h.help, m.labels, h.h)
	}
}

// requests writes the histograms of token counts and of n.
func (m *metrics) requests() {
	s := m.stats
	m.histograms([]namedHistogram{
		{"vllm:request_prompt_tokens", "Number of prefill tokens processed.", s.requestPromptTokens},
		{"vllm:request_generation_tokens", "Number of generation tokens processed.", s.requestGenerationTokens},
		{"vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", s.iterationTokens},
		{"vllm:request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", s.longestGeneration},
		{"vllm:request_params_n", "Histogram of the n request parameter.", s.answers},
		{"vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", s.maxTokens},
	})
}

// intervals writes the histograms of times, and the two histograms that follow them in vLLM.
func (m *metrics) intervals() {
	s := m.stats
	m.histograms([]namedHistogram{
		{"vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", s.firstToken},
		{"vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", s.interToken},
		{"vllm:request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", s.perOutputToken},
		{"vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", s.endToEnd},
		{"vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", s.queue},
		{"vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", s.inference},
		{"vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", s.prefill},
		{"vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", s.decode},
	})
	if m.release.since032 {
		m.histogram("vllm:request_num_preemptions", "Histogram of the number of times a request was preempted.", m.labels, s.preemptions)
	}
	m.histogram("vllm:request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill (excluding cached tokens).", m.labels, s.prefillComputed)
}

// cacheConfig returns the fields of vLLM's CacheConfig as labels. A field that the simulator does not model has its
// recorded value.
func (m *metrics) cacheConfig() (pairs []string) {
	o := m.engine.Options
	fields := maps.Clone(m.release.cacheConfig)
	fields["engine"] = "0"
	fields["block_size"] = strconv.Itoa(sim.BlockSize)
	fields["enable_prefix_caching"] = pythonBool(!o.NoPrefixCaching)
	fields["gpu_memory_utilization"] = pythonRepr(o.GPUMemoryUtilization)
	fields["num_gpu_blocks"] = strconv.Itoa(m.engine.KVTokens() / sim.BlockSize)
	for label, flag := range map[string]string{"cache_dtype": "kv_cache_dtype", "swap_space": "swap_space"} {
		if v, given := o.Given[flag]; given {
			fields[label] = strings.Trim(pythonValue(v), "'")
		}
	}
	if m.release.since032 {
		fields["effective_attention_block_size"] = strconv.Itoa(sim.BlockSize)
		fields["kv_cache_size_tokens"] = strconv.Itoa(m.engine.KVTokens())
		fields["kv_cache_max_concurrency"] = pythonRepr(float64(m.engine.KVTokens()) / float64(o.MaxModelLen))
	}
	for name, value := range fields {
		pairs = append(pairs, name, value)
	}
	return pairs
}
