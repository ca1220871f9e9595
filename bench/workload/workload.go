// Package workload says which requests are sent and when: datasets, conversations, lengths, and seeded arrivals.
// It does not use the network.
package workload

import (
	"iter"
	"time"
)

// A Request is one request to the server. Its work is pinned: the server must answer with exactly OutputTokens tokens.
// Exactly one of Tokens, Text and Messages is set.
type Request struct {
	Tokens   []int32   // prompt as token ids; shared between requests, never written to
	Text     string    // prompt as plain text
	Messages []Message // prompt as a chat

	PromptTokens int // length of the prompt in tokens; 0 if only the server can count it
	OutputTokens int // tokens to generate, at least 1
	Conversation int // number of its conversation; -1 if it belongs to none
	Turn         int // turn in its conversation, from 1; 0 if it belongs to none

	// Next returns the next request of a live conversation, and the think time before it. The parameter answer is the real
	// answer to this request. Next is nil if nothing follows.
	Next func(answer string) (*Request, time.Duration)
}

// A Message is one message of a chat, with OpenAI's names of the fields.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// A Stream names an independent seeded sequence of requests and arrivals.
// The same population, seed and stream always give the same sequence.
type Stream uint64

// The seeded streams of a probe. Each part of a probe has its own stream, so that a longer lead-in does not change the
// window's requests.
const (
	WarmUpStream Stream = iota + 1
	PrimeStream
	leadInStream
	WindowStream
	runOutStream
	PopulationStream // never sent; gives a sample of the workload
)

// Draw returns the stream of draw n: another random sequence from the same population, for the same part of a probe.
// Draw 0 is the stream itself. Two measurements that are to be compared use the same draw. A measurement that must be
// independent of others uses a new draw.
func (s Stream) Draw(n int) Stream { return s | Stream(n)<<drawBits }

// drawBits is the number of low bits that hold the stream. The bits above them hold the number of the draw.
const drawBits = 8

// A Phase is the part of a probe in which a request is due.
type Phase uint8

// The phases in their order. Only requests of the Window are counted.
const (
	LeadIn Phase = iota
	Window
	RunOut
)

// String returns the name of the phase, such as "lead-in".
func (p Phase) String() string {
	return [...]string{"lead-in", "window", "run-out"}[p]
}

// Asap is the due time of a request in a closed loop without a rate. Such a request is due when a request in flight
// ends.
const Asap time.Duration = -1

// An Arrival is one request with the time at which it is due.
type Arrival struct {
	Due     time.Duration // since the start of the probe, or Asap
	Phase   Phase
	Index   int // number within its phase, from 0
	Request *Request
}

// A Source gives the requests of a study.
type Source interface {
	// Name describes the source for reports in a few words, such as "phase1 (300 requests)".
	Name() string
	// Len returns how many requests the source has before it repeats; 0 means endless.
	Len() int
	// Request returns the i-th request of the stream, i >= 0. In a finite source the i-th and the (i+Len)-th request are
	// the same, unless repetitions are salted. Several goroutines may call Request at once.
	Request(stream Stream, i int) *Request
	// Longest returns the largest sum of prompt and output tokens that the source can draw; 0 means unknown.
	Longest() int
}

// A Plan is the load of one probe: an uncounted lead-in, a counted window, and a run-out that goes on until the caller
// stops reading.
type Plan struct {
	Source      Source
	Seed        uint64        // seed of the arrivals
	Rate        float64       // requests per second, > 0
	LeadIn      time.Duration // uncounted load before the window
	Window      time.Duration // the window lasts at least this long
	MinRequests int           // the window also lasts until at least this many requests are due in it
	Arrivals    Arrivals      // distribution of the gaps between arrivals
	Draw        int           // which independent draw of requests and arrivals to use, from 0

	// Rescale sets the times of arrivals as vllm bench serve does (get_request in vllm/benchmarks/serve.py, 0.14.1 and
	// 0.33). There are exactly MinRequests requests, and all are counted. Their times are stretched so that the last one
	// is due at MinRequests/Rate. There is no lead-in and no run-out. LeadIn and Window are not used.
	Rescale bool
}

// A Pass is an uncounted run through N requests of a stream, to fill the prefix cache.
type Pass struct {
	Source Source
	Seed   uint64
	Stream Stream
	Rate   float64
	First  int // index of the first request in its stream
	N      int
}

// A Schedule is a sequence of arrivals in the order of their due times. It ends by itself, or it goes on for ever with
// requests of the RunOut phase.
type Schedule = iter.Seq[Arrival]
