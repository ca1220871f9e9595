package vllm

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// metrics answers with the counters that the tuner and `vllm bench serve` read, under vLLM's names and in vLLM's order
// (vllm/v1/metrics/loggers.py, 0.14.1 to 0.33.0). As in vLLM there are none with --disable-log-stats.
func (a *api) metrics(w http.ResponseWriter, _ *http.Request) {
	e := &exposition{}
	a.live.with(func(engine *sim.Engine) {
		e.created = float64(a.live.stats.since.UnixNano()) / 1e9
		if !engine.Options.NoStats {
			writeMetrics(e, engine, a.live.stats)
		}
	})
	w.Header().Set("Content-Type", metricsType)
	_, _ = w.Write(e.buf.Bytes()) // fails when the client has disconnected
}

// metricsType is the content type of prometheus_client 0.26, with which all versions were recorded.
const metricsType = "text/plain; version=1.0.0; charset=utf-8"

// stats are the counters of vLLM's API server (vllm/v1/metrics/stats.py). It counts tokens when it delivers them.
type stats struct {
	since                          time.Time // when counting began
	promptTokens, generationTokens int
	finished                       int // answers with all their tokens
}

func writeMetrics(e *exposition, engine *sim.Engine, s *stats) {
	one := func(v float64, labels ...string) sample {
		return sample{labels: append([]string{"model_name", engine.Options.Model, "engine", "0"}, labels...), value: v}
	}
	count := func(name, help string, n int) { e.counter(name, help, one(float64(n))) }
	t := engine.Totals
	if len(t.AcceptedPerPos) > 0 { // only with speculative decoding (vllm/v1/spec_decode/metrics.py)
		count("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", t.Drafts)
		count("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", t.DraftTokens)
		count("vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", t.AcceptedTokens)
		var positions []sample
		for i, n := range t.AcceptedPerPos {
			positions = append(positions, one(float64(n), "position", strconv.Itoa(i)))
		}
		e.counter("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position.", positions...)
	}
	e.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", one(float64(engine.Running())))
	e.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", one(float64(engine.Waiting())))
	e.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", one(engine.KVUsage()))
	count("vllm:prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", t.PrefixQueries)
	count("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", t.PrefixHits)
	count("vllm:num_preemptions", "Cumulative number of preemption from the engine.", t.Preemptions)
	count("vllm:prompt_tokens", "Number of prefill tokens processed.", s.promptTokens)
	count("vllm:generation_tokens", "Number of generation tokens processed.", s.generationTokens)
	e.counter("vllm:request_success", "Count of successfully processed requests.", one(float64(s.finished), "finished_reason", "length"))
	e.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", sample{labels: cacheConfig(engine), value: 1})
}

// cacheConfig returns the fields of vLLM's CacheConfig that serverctl reads, as labels.
func cacheConfig(engine *sim.Engine) []string {
	o, dtype := engine.Options, "auto"
	if v, given := o.Given["kv_cache_dtype"]; given {
		dtype = strings.Trim(pythonValue(v), "'")
	}
	return []string{
		"block_size", strconv.Itoa(sim.BlockSize), "cache_dtype", dtype, "enable_prefix_caching", pythonBool(!o.NoPrefixCaching),
		"engine", "0", "gpu_memory_utilization", pythonRepr(o.GPUMemoryUtilization), "kv_cache_memory_bytes", "None",
		"num_gpu_blocks", strconv.Itoa(engine.KVTokens() / sim.BlockSize),
	}
}
