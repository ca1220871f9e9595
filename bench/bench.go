// Package bench sends a workload over HTTP and measures the answers as vLLM's own benchmark does. It never judges them.
package bench

import (
	"time"

	"vllmtuner/bench/workload"
)

// A Failure is the kind of way in which a request failed. The empty Failure is success.
type Failure string

// The kinds of failure, each counted by name in a Measurement.
const (
	Refused       Failure = "refused"        // no connection
	Reset         Failure = "reset"          // the connection broke in mid-answer
	TimedOut      Failure = "timed-out"      // no bytes for too long
	Status        Failure = "http-status"    // 4xx or 5xx
	StreamError   Failure = "stream-error"   // an error object in the stream under HTTP 200
	Truncated     Failure = "truncated"      // the stream ended without [DONE]
	NoUsage       Failure = "no-usage"       // the stream had no usage chunk
	NoTokens      Failure = "no-tokens"      // zero tokens were generated
	WrongLength   Failure = "wrong-length"   // fewer or more tokens than pinned
	NeverFinished Failure = "never-finished" // the probe ended before the answer did
	Malformed     Failure = "malformed"      // the stream was no SSE or no JSON
)

// A Sample is what happened to one request. All times count from the start of the probe.
// A zero First, Last or End means that it has not happened.
type Sample struct {
	Phase workload.Phase
	Index int // within its phase

	Due       time.Duration // when it should have been sent: latencies count from here
	Queued    time.Duration // how long it waited for a place in flight, in a closed loop with a rate
	Sent      time.Duration // when it was sent; see SendLag for the client's own lateness
	Connected time.Duration // when it had a connection; Sent, unless one had to be opened for it
	Opened    time.Duration // first chunk with choices, which for chat only names the role; vLLM 0.14.1 takes it for the first token
	First     time.Duration // first token
	Last      time.Duration // last token
	Closed    time.Duration // last chunk of any kind, the usage chunk included
	End       time.Duration // the answer is complete, or has failed
	ReadLag   time.Duration // the longest that bytes of the answer had waited in this machine before they were read

	Blur   time.Duration // by how much First may be too late, because further tokens were read together with it
	Vacant time.Duration // how long its place in a closed loop without a rate had been free; it was due when it was sent

	PromptTokens int // as the server counted them
	CachedTokens int // prompt tokens found in the prefix cache, where the server says so
	OutputTokens int // as the server counted them
	WantTokens   int // as pinned
	Chunks       int // chunks that carried output; with speculative decoding and on a busy server fewer than tokens
	Pieces       int // times at which such chunks came; 0 where it is not known
	Blank        int // such chunks without a text
	TextBytes    int // of all chunks, as JSON has them, and one for each token that the server says it has thought

	Role bool // the first chunk only named the role

	Conversation int // of a live conversation; -1 when none
	Turn         int // 1-based turn in its conversation; 0 when none
	LastTurn     bool

	Gaps    []time.Duration // times between tokens (ITL), only when asked for
	Failure Failure         // "" for success
	Detail  string          // first line of the error, for the first few failures
}

// OK reports whether the request ended well.
func (s Sample) OK() bool { return s.End > 0 && s.Failure == "" }

// TTFT returns the time to first token, counted from the due time.
func (s Sample) TTFT() time.Duration { return s.First - s.Due }

// TPOT returns the mean time per output token after the first, (last - first)/(tokens - 1), and whether it is defined:
// vLLM leaves answers of one token out (vllm/benchmarks/serve.py, 0.14.1 and 0.33).
func (s Sample) TPOT() (time.Duration, bool) {
	if s.OutputTokens < 2 {
		return 0, false
	}
	return (s.Last - s.First) / time.Duration(s.OutputTokens-1), true
}

// E2E returns the end-to-end latency up to the last token, counted from the due time.
func (s Sample) E2E() time.Duration { return s.Last - s.Due }

// SendLag returns how late the client itself was. In a closed loop without a rate no latency contains it.
func (s Sample) SendLag() time.Duration { return s.Sent - s.Due - s.Queued + s.Vacant }

// Stop is asked about once a second of the probe whether it may end early. It sees the counted requests so far,
// in order of Index; pending ones have End zero.
type Stop func(now time.Duration, counted []Sample) bool

// A Run is one schedule sent to a server.
type Run struct {
	Samples      []Sample      // the counted requests, in order of Index
	Others       int           // uncounted requests that were sent (lead-in, run-out, pass)
	Broken       int           // uncounted requests that failed
	BrokenDetail string        // kind and text of the first of them
	Stopped      bool          // Stop ended the run
	Tally        *Tally        // sums of all counted requests, when they were more than Client.MaxSamples; then Samples is empty
	Series       Series        // what happened in each second, uncounted requests included
	Lateness     Lateness      // of the client itself
	Stalled      time.Duration // longest time for which this process stood still, as when it was stopped; 0 below half a second
	Elapsed      time.Duration // from the start of the schedule until the last request had ended
}

// A Series is what happened in each whole second of a run, from its start. Uncounted requests are in it.
type Series []Second

// A Second is one second of a Series.
type Second struct {
	Sent     int `json:"sent"`
	Ended    int `json:"ended"`     // answers that ended well
	Failed   int `json:"failed"`    // requests that failed
	InFlight int `json:"in_flight"` // at the end of the second
	Chunks   int `json:"chunks"`    // chunks of output that came; Sample says why these are not tokens
}

// Lateness is what the client itself may have added to the latencies of a run, and what it cost.
type Lateness struct {
	GCPause      time.Duration `json:"gc_pause_ns"`      // longest pause of the garbage collector
	SchedulerP99 time.Duration `json:"scheduler_p99_ns"` // how long a goroutine that could run waited for a processor
	Throttled    time.Duration `json:"throttled_ns"`     // time for which the cgroup's CPU limit stopped the process (cpu.stat)
	CPU          time.Duration `json:"cpu_ns"`           // CPU time of the process, user and system
}
