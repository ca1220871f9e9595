package vllmsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// An api is the HTTP face of one live engine.
type api struct {
	live *live
	log  *logger
	next atomic.Uint64 // number of the last request
}

// newAPI returns the handler of all routes. The routes of vLLM's development mode exist only with VLLM_SERVER_DEV_MODE=1.
func newAPI(l *live, log *logger) http.Handler {
	a := &api{live: l, log: log}
	registry := prometheus.NewRegistry()
	registry.MustRegister(&metrics{live: l}) // fails only for metrics of one name, which metrics has not
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", ok)
	mux.HandleFunc("GET /ping", ok)
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]string{"version": Version})
	})
	mux.HandleFunc("GET /v1/models", a.models)
	mux.HandleFunc("POST /v1/completions", a.completions)
	mux.HandleFunc("POST /v1/chat/completions", a.chat)
	mux.HandleFunc("POST /tokenize", a.tokenize)
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	if os.Getenv("VLLM_SERVER_DEV_MODE") == "1" {
		mux.HandleFunc("POST /reset_prefix_cache", a.resetPrefixCache)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusNotFound, map[string]string{"detail": "Not Found"})
	})
	return mux
}

func ok(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }

// answer writes v as JSON. A client that has gone is no error of the server's.
func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// refuse answers with an error body as vLLM 0.14.1 has it (vllm/entrypoints/openai/protocol.py, ErrorResponse).
func refuse(w http.ResponseWriter, status int, kind, format string, args ...any) {
	answer(w, status, map[string]any{"error": map[string]any{
		"message": fmt.Sprintf(format, args...), "type": kind, "param": nil, "code": status,
	}})
}

func (a *api) models(w http.ResponseWriter, _ *http.Request) {
	o := a.live.engine.Options
	answer(w, http.StatusOK, map[string]any{"object": "list", "data": []any{map[string]any{
		"id": o.Model, "object": "model", "created": time.Now().Unix(), "owned_by": "vllm", "root": o.Model, "parent": nil,
		"max_model_len": o.MaxModelLen,
	}}})
}

func (a *api) tokenize(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Prompt string `json:"prompt"`
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		refuse(w, http.StatusBadRequest, "BadRequestError", "invalid JSON: %v", err)
		return
	}
	tokens := Tokenize(body.Prompt)
	answer(w, http.StatusOK, map[string]any{"count": len(tokens), "max_model_len": a.live.engine.Options.MaxModelLen, "tokens": tokens})
}

// resetPrefixCache answers 200 with an empty body whether it could or not, as 0.14.1 does; the log says which.
func (a *api) resetPrefixCache(w http.ResponseWriter, _ *http.Request) {
	a.live.with(func(e *Engine) {
		if e.ResetCache() {
			a.log.engine("block_pool.py:451", "Successfully reset prefix cache")
			return
		}
		used := e.pool.total() - e.pool.free
		a.log.line(engineCore, "WARNING", "block_pool.py:438", "Failed to reset prefix cache because some blocks (%d) are not freed yet", used)
	})
	w.WriteHeader(http.StatusOK)
}

// metrics gives the engine's counters under vLLM's names (vllm/v1/metrics/loggers.py, 0.14.1).
type metrics struct{ live *live }

// Describe sends nothing: the metrics are made anew at each scrape.
func (m *metrics) Describe(chan<- *prometheus.Desc) {}

// Collect sends the figures of this moment.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	m.live.with(func(e *Engine) {
		labels := []string{"engine", "model_name"}
		send := func(kind prometheus.ValueType, name, help string, v float64) {
			out <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, labels, nil), kind, v, "0", e.Options.Model)
		}
		t := e.Totals
		send(prometheus.GaugeValue, "vllm:num_requests_running", "Number of requests in model execution batches.", float64(e.Running()))
		send(prometheus.GaugeValue, "vllm:num_requests_waiting", "Number of requests waiting to be processed.", float64(e.Waiting()))
		send(prometheus.GaugeValue, "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", e.KVUsage())
		send(prometheus.CounterValue, "vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", float64(t.PrefixQueries))
		send(prometheus.CounterValue, "vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", float64(t.PrefixHits))
		send(prometheus.CounterValue, "vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", float64(t.Preemptions))
		send(prometheus.CounterValue, "vllm:prompt_tokens_total", "Number of prefill tokens processed.", float64(t.PromptTokens))
		send(prometheus.CounterValue, "vllm:generation_tokens_total", "Number of generation tokens processed.", float64(t.GenerationTokens))
		out <- prometheus.MustNewConstMetric(
			prometheus.NewDesc("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", []string{"block_size", "engine", "gpu_memory_utilization", "num_gpu_blocks"}, nil),
			prometheus.GaugeValue, 1, strconv.Itoa(blockSize), "0", strconv.FormatFloat(e.Options.GPUMemoryUtilization, 'g', -1, 64), strconv.Itoa(e.pool.total()))
		out <- prometheus.MustNewConstMetric(
			prometheus.NewDesc("vllm:request_success_total", "Count of successfully processed requests.", []string{"engine", "finished_reason", "model_name"}, nil),
			prometheus.CounterValue, float64(t.Finished), "0", "length", e.Options.Model)
	})
}
