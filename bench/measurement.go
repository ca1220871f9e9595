package bench

import "time"

// A Measurement sums up the counted requests of one run. Latencies are in milliseconds and throughputs per second.
// Percentiles, throughput and the rest follow calculate_metrics in vllm/benchmarks/serve.py (0.14.1, 0.32 and 0.33) unless a
// field says otherwise. It is stored with each probe.
type Measurement struct {
	Rate      float64         `json:"rate"`      // offered, requests per second; 0 for a closed loop
	Window    time.Duration   `json:"window_ns"` // in which the counted requests were due
	Rules     Rules           `json:"rules,omitempty"`
	Requests  int             `json:"requests"` // counted: due in the window; those of a stopped run that were pending are neither completed nor failed
	Completed int             `json:"completed"`
	Failed    int             `json:"failed"`
	Failures  map[Failure]int `json:"failures,omitempty"`

	TTFT     Stats    `json:"ttft_ms"` // from the due time; completed requests only, as vLLM has it
	TPOT     Stats    `json:"tpot_ms"` // answers of at least two tokens
	ITL      Stats    `json:"itl_ms"`  // pooled gaps; empty unless they were asked for
	E2E      Stats    `json:"e2e_ms"`
	SendLag  Stats    `json:"send_lag_ms"`          // the client's own lateness, of all that were sent
	ReadLag  Stats    `json:"read_lag_ms,omitzero"` // the longest that bytes of an answer waited in this machine, of the completed
	Queue    Stats    `json:"queue_ms,omitzero"`    // waits for a place in flight, of the completed; empty where none waited. TTFT and E2E contain them, vLLM's do not
	Connect  Stats    `json:"connect_ms,omitzero"`  // of those that had to open a connection
	Exact    bool     `json:"exact"`                // percentiles are those of the values themselves, not a sketch's (within 0.5 %)
	Lateness Lateness `json:"lateness,omitzero"`    // what the client itself may have added

	Over    []OverLimit `json:"over,omitempty"`            // by limit, in the order of the limits that were given
	Good    int         `json:"good,omitempty"`            // completed requests that kept all limits; 0 when none was given
	Goodput float64     `json:"request_goodput,omitempty"` // good requests per second of Duration

	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"`
	OutputTokens int `json:"output_tokens"`
	WantTokens   int `json:"want_tokens"` // output as pinned, of the completed requests

	OffPlan float64 `json:"off_plan,omitempty"` // served tokens too many or too few, per pinned one, over all answers that ended by themselves
	Void    string  `json:"void,omitempty"`     // why the run measured something else than was planned; "" when it did not

	// Duration is vLLM's: from when it began to send until the last counted request had ended, a failed one included, so that
	// the gap before the first request and the slow end are in it. vLLM has no lead-in; with one, it begins where that ends.
	Duration          time.Duration `json:"duration_ns"`
	RequestThroughput float64       `json:"request_throughput"`               // completed, over Duration
	OutputThroughput  float64       `json:"output_throughput"`                // output tokens, over Duration
	TotalThroughput   float64       `json:"total_token_throughput,omitempty"` // prompt and output tokens, over Duration

	// The throughput of the window is what the server did in the whole seconds of the window, whenever the request was due.
	// Unlike vLLM's it has no slow end and compares with the offered rate. It needs the run's Series, and is 0 without.
	WindowRequestThroughput float64 `json:"window_request_throughput,omitempty"` // answers that ended well
	WindowOutputThroughput  float64 `json:"window_output_throughput,omitempty"`  // chunks, times the tokens per chunk of the counted requests

	PeakChunks   int     `json:"peak_chunks_per_s,omitempty"` // most chunks of output in one second: vLLM's max_output_tokens_per_s, which counts chunks too
	PeakInFlight int     `json:"peak_in_flight"`              // of the counted requests, by vLLM's whole-second buckets
	MeanInFlight float64 `json:"mean_in_flight"`              // of the counted requests, by Little's law: sum of their times in the server / window

	Sessions Sessions `json:"sessions,omitzero"` // of live conversations
	Series   Series   `json:"series,omitempty"`
	Sketches Sketches `json:"sketches,omitzero"` // if they were asked for
}

// An OverLimit is how many completed requests were over a limit. A failed one breaks every limit and is in Failed alone.
type OverLimit struct {
	Limit
	Over int `json:"over"`
}

// Sessions are the live conversations of a run.
type Sessions struct {
	Turns     int     `json:"turns"`      // completed
	Completed int     `json:"completed"`  // conversations whose last turn was completed
	PerSecond float64 `json:"per_second"` // completed conversations, over Duration
}

// Stats are the usual figures of one latency in milliseconds. Zero when N is zero.
type Stats struct {
	N    int     `json:"n"`
	Mean float64 `json:"mean"`
	Std  float64 `json:"std"` // of the values as they are (numpy's ddof 0)
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99.9"`
	Max  float64 `json:"max"`
}
