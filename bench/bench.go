// Package bench sends a workload over HTTP and measures the answers as vLLM's own benchmark does. It never judges them.
package bench

import (
	"time"

	"vllmtuner/bench/workload"
)

// A Failure says in which way a request failed. The empty Failure means success.
type Failure string

// The kinds of failure, each counted by name in a Measurement.
const (
	Refused       Failure = "refused"        // no connection
	Reset         Failure = "reset"          // the connection broke during the answer
	TimedOut      Failure = "timed-out"      // no bytes for too long
	Status        Failure = "http-status"    // 4xx or 5xx
	StreamError   Failure = "stream-error"   // an error object in the stream under HTTP 200
	Truncated     Failure = "truncated"      // the stream ended without [DONE]
	NoUsage       Failure = "no-usage"       // the stream had no usage chunk
	NoTokens      Failure = "no-tokens"      // zero tokens were generated
	WrongLength   Failure = "wrong-length"   // fewer or more tokens than the request demanded (pinned)
	NeverFinished Failure = "never-finished" // the probe ended before the answer did
	Malformed     Failure = "malformed"      // the stream was not SSE, or its data was not JSON
)

// A Sample is what happened to one request. All times count from the start of the probe (one run against the server).
// First, Last and End are zero until they happen.
type Sample struct {
	Phase workload.Phase
	Index int // number within its phase, from 0

	Due       time.Duration // when it should have been sent; latencies count from this time
	Queued    time.Duration // how long it waited for a free slot, in a run with a rate and a maximum of requests in flight
	Sent      time.Duration // when it was sent; SendLag returns the client's own lateness
	Connected time.Duration // when it had a connection; equals Sent unless a new connection was opened
	Opened    time.Duration // when the first chunk with choices came; in a chat that chunk only names the role, and vLLM 0.14.1 counts it as the first token
	First     time.Duration // first token
	Last      time.Duration // last token
	Closed    time.Duration // when the last chunk of any kind came, the usage chunk included
	End       time.Duration // when the answer was complete or the request failed
	ReadLag   time.Duration // the longest time that bytes of the answer waited in this machine before the client read them

	Blur     time.Duration // First may be too late by at most this much, because the first token was read together with later tokens
	SlotFree time.Duration // in a closed loop without a rate: how long the request's slot had been free when the request was sent

	PromptTokens int // as the server counted them
	CachedTokens int // prompt tokens found in the prefix cache, if the server reports them
	OutputTokens int // as the server counted them
	WantTokens   int // tokens that the request demanded (pinned)
	Chunks       int // chunks with output; fewer than tokens with speculative decoding or on a busy server
	Pieces       int // distinct arrival times of chunks with output; 0 if unknown
	Blank        int // chunks with output but without text
	TextBytes    int // text in all chunks, in bytes of JSON, plus one byte for each reasoning token that the server reports

	Role bool // the first chunk only named the role

	Conversation int // number of the live conversation that the request belongs to; -1 if it belongs to none
	Turn         int // number of the turn in that conversation, from 1; 0 if the request belongs to none
	LastTurn     bool

	Gaps    []time.Duration // times between tokens (ITL); empty unless recorded
	Failure Failure         // "" for success
	Status  int             // HTTP status, if Failure is Status and the client knows it; 0 otherwise
	Detail  string          // first line of the error; kept only for the first few failures
}

// OK reports whether the request ended without a failure.
func (s Sample) OK() bool { return s.End > 0 && s.Failure == "" }

// TTFT returns the time to first token, counted from the due time.
func (s Sample) TTFT() time.Duration { return s.First - s.Due }

// TPOT returns the mean time per output token after the first, (last - first)/(tokens - 1).
// It is undefined for an answer of one token, which vLLM leaves out too (vllm/benchmarks/serve.py, 0.14.1 and 0.33).
func (s Sample) TPOT() (time.Duration, bool) {
	if s.OutputTokens < 2 {
		return 0, false
	}
	return (s.Last - s.First) / time.Duration(s.OutputTokens-1), true
}

// E2E returns the end-to-end latency up to the last token, counted from the due time.
func (s Sample) E2E() time.Duration { return s.Last - s.Due }

// SendLag returns how late the client sent the request. In a closed loop without a rate, no latency includes this
// delay.
func (s Sample) SendLag() time.Duration { return s.Sent - s.Due - s.Queued + s.SlotFree }

// A Stop function reports whether the probe may end early. The client calls it about once a second with the counted
// requests so far, in order of Index. Pending requests have a zero End.
type Stop func(now time.Duration, counted []Sample) bool

// A Run is the record of one schedule that was sent to a server.
type Run struct {
	Samples      []Sample      // the counted requests, in order of Index
	Others       int           // uncounted requests that were sent: lead-in, run-out, and passes that fill the cache
	Broken       int           // uncounted requests that failed
	BrokenDetail string        // kind and text of the first failure of an uncounted request
	BrokenStatus int           // Sample.Status of that request
	Stopped      bool          // the Stop function ended the run
	Tally        *Tally        // sums of all counted requests; set only if there were too many to keep (Client.MaxSamples), and then Samples is empty
	Series       Series        // what happened in each second, uncounted requests included
	Lateness     Lateness      // delays in the client itself
	Stalled      time.Duration // longest time that this process did not run, for example because it was suspended; 0 below 0.5 s
	Elapsed      time.Duration // from the start of the schedule until the last request had ended
}

// A Series is what happened in each whole second of a run, from its start. It includes uncounted requests.
type Series []Second

// A Second is one second of a Series.
type Second struct {
	Sent     int `json:"sent"`
	Ended    int `json:"ended"`     // answers that ended well
	Failed   int `json:"failed"`    // requests that failed
	InFlight int `json:"in_flight"` // requests in flight at the end of the second
	Chunks   int `json:"chunks"`    // chunks with output; a chunk may hold several tokens
}

// Lateness is the delay that the client itself may have added to the latencies of a run, and the client's CPU time.
type Lateness struct {
	GCPause      time.Duration `json:"gc_pause_ns"`      // longest pause of the garbage collector
	SchedulerP99 time.Duration `json:"scheduler_p99_ns"` // p99 of the time that a runnable goroutine waited for a processor
	Throttled    time.Duration `json:"throttled_ns"`     // how long the cgroup's CPU limit stopped the process (cpu.stat)
	CPU          time.Duration `json:"cpu_ns"`           // CPU time of the process, user and system
}
