package bench

import "time"

// A Measurement sums up the counted requests of one run. Latencies are in milliseconds and throughputs per second.
// Figures follow calculate_metrics in vllm/benchmarks/serve.py (0.14.1, 0.32 and 0.33) unless a field says otherwise.
// The store keeps a Measurement of each probe.
type Measurement struct {
	Rate      float64         `json:"rate"`      // offered requests per second; 0 for a closed loop
	Window    time.Duration   `json:"window_ns"` // length of the window, in which the counted requests were due
	Rules     Rules           `json:"rules,omitempty"`
	Requests  int             `json:"requests"` // counted requests; in a stopped run some may be neither completed nor failed
	Completed int             `json:"completed"`
	Failed    int             `json:"failed"`
	Failures  map[Failure]int `json:"failures,omitempty"`

	TTFT     Stats    `json:"ttft_ms"` // time to first token, from the due time; completed requests only, as in vLLM
	TPOT     Stats    `json:"tpot_ms"` // time per output token; only answers of at least two tokens
	ITL      Stats    `json:"itl_ms"`  // times between tokens, over all answers; empty unless Client.ITL was set
	E2E      Stats    `json:"e2e_ms"`
	SendLag  Stats    `json:"send_lag_ms"`          // the client's own lateness, over all requests that were sent
	ReadLag  Stats    `json:"read_lag_ms,omitzero"` // Sample.ReadLag of the completed requests
	Queue    Stats    `json:"queue_ms,omitzero"`    // how long completed requests waited for a slot; empty if none waited. TTFT and E2E include these waits, but not in vLLM
	Connect  Stats    `json:"connect_ms,omitzero"`  // time to connect, for the requests that needed a new connection
	Exact    bool     `json:"exact"`                // whether percentiles are exact; otherwise a sketch gives them within 0.5 %
	Lateness Lateness `json:"lateness,omitzero"`    // delays in the client itself

	Over    []OverLimit `json:"over,omitempty"`            // one for each limit, in the order of the limits
	Good    int         `json:"good,omitempty"`            // completed requests that kept all limits; 0 without limits
	Goodput float64     `json:"request_goodput,omitempty"` // good requests per second of Duration

	PromptTokens int `json:"prompt_tokens"`
	CachedTokens int `json:"cached_tokens"`
	OutputTokens int `json:"output_tokens"`
	WantTokens   int `json:"want_tokens"` // pinned output of the completed requests

	OffPlan float64 `json:"off_plan,omitempty"` // tokens too many or too few, as a share of the pinned tokens
	Void    string  `json:"void,omitempty"`     // why the run did not measure what was planned; "" if it did

	// Duration is defined as in vLLM: from the start of sending until the last counted request ended, failed or not. It
	// includes the gap before the first request and the end of the run, when only the last few requests are in flight.
	// vLLM has no lead-in. In a run with a lead-in, Duration begins when the lead-in ends.
	Duration          time.Duration `json:"duration_ns"`
	RequestThroughput float64       `json:"request_throughput"`               // completed requests, over Duration
	OutputThroughput  float64       `json:"output_throughput"`                // output tokens, over Duration
	TotalThroughput   float64       `json:"total_token_throughput,omitempty"` // prompt and output tokens, over Duration

	// The throughput of the window counts everything that the server did in the whole seconds of the window, whenever the
	// requests were due. Unlike vLLM's throughput, it leaves out the end of the run, when only the last few requests are
	// in flight. So it can be compared with the offered rate. It is 0 if the run has no Series.
	WindowRequestThroughput float64 `json:"window_request_throughput,omitempty"` // answers that ended well, per second
	WindowOutputThroughput  float64 `json:"window_output_throughput,omitempty"`  // chunks per second, times the tokens per chunk of the counted requests

	PeakChunks   int     `json:"peak_chunks_per_s,omitempty"` // largest number of chunks in one second; vLLM's max_output_tokens_per_s counts chunks too
	PeakInFlight int     `json:"peak_in_flight"`              // largest number of counted requests in flight in one whole second, as vLLM counts them
	MeanInFlight float64 `json:"mean_in_flight"`              // mean of counted requests in flight, by Little's law: total time in the server / window

	Sessions Sessions `json:"sessions,omitzero"` // empty without live conversations
	Series   Series   `json:"series,omitempty"`
	Sketches Sketches `json:"sketches,omitzero"` // empty unless Scope.Sketches was set
}

// An OverLimit counts the completed requests that were over a limit. A failed request breaks every limit, but it counts
// only in Failed.
type OverLimit struct {
	Limit
	Over int `json:"over"`
}

// Sessions counts the live conversations of a run.
type Sessions struct {
	Turns     int     `json:"turns"`      // completed turns
	Completed int     `json:"completed"`  // conversations whose last turn was completed
	PerSecond float64 `json:"per_second"` // completed conversations, over Duration
}

// Stats are the usual statistics of one latency in milliseconds. All are zero if N is zero.
type Stats struct {
	N    int     `json:"n"`
	Mean float64 `json:"mean"`
	Std  float64 `json:"std"` // population standard deviation (numpy's ddof 0)
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P95  float64 `json:"p95"`
	P99  float64 `json:"p99"`
	P999 float64 `json:"p99.9"`
	Max  float64 `json:"max"`
}
