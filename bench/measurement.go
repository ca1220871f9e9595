package bench

import "time"

// A Measurement sums up the counted requests of one run. Latencies are in milliseconds.
// Percentiles, throughput and the rest follow vllm/benchmarks/serve.py (0.14.1 and 0.33) unless a field says otherwise.
type Measurement struct {
	Rate      float64         `json:"rate"`      // offered, requests per second
	Window    time.Duration   `json:"window_ns"` // in which the counted requests were due
	Requests  int             `json:"requests"`  // counted: due in the window
	Completed int             `json:"completed"`
	Failed    int             `json:"failed"`
	Failures  map[Failure]int `json:"failures,omitempty"`

	TTFT    Stats `json:"ttft_ms"` // from the due time; completed requests only, as vLLM has it
	TPOT    Stats `json:"tpot_ms"` // answers of at least two tokens
	ITL     Stats `json:"itl_ms"`  // pooled gaps; empty unless they were asked for
	E2E     Stats `json:"e2e_ms"`
	SendLag Stats `json:"send_lag_ms"` // the client's own lateness

	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"`
	OutputTokens int `json:"output_tokens"`
	WantTokens   int `json:"want_tokens"` // output as pinned, of the completed requests

	RequestThroughput float64 `json:"request_throughput"` // completed per second, from the window's start to the last token
	OutputThroughput  float64 `json:"output_throughput"`  // tokens per second over the same time
	PeakInFlight      int     `json:"peak_in_flight"`     // of the counted requests, by vLLM's whole-second buckets
	MeanInFlight      float64 `json:"mean_in_flight"`     // of the counted requests, by Little's law: sum of E2E / window
}

// Stats are the usual figures of one latency in milliseconds. Zero when N is zero.
type Stats struct {
	N    int     `json:"n"`
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
}
