// Package workload says what is asked and when: datasets, conversations, lengths, and seeded arrivals.
// It does no network.
package workload

import (
	"iter"
	"time"
)

// A Request is one question to the server with its work pinned: the server must answer with exactly OutputTokens
// tokens. Exactly one of Tokens, Text and Messages is set.
type Request struct {
	Tokens   []int32   // prompt as token ids; shared between requests, never written to
	Text     string    // prompt as plain text
	Messages []Message // prompt as a chat

	PromptTokens int // length of the prompt in tokens; 0 when only the server can count it
	OutputTokens int // tokens to generate, at least 1
	Conversation int // which conversation the request belongs to; -1 when none
	Turn         int // 1-based turn in its conversation; 0 when none

	// Next returns the request that follows the real answer of this one in a live conversation, and how long its user thinks
	// before sending it. It is nil when nothing follows.
	Next func(answer string) (*Request, time.Duration)
}

// A Message is one message of a chat, under OpenAI's names.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// A Stream names an independent seeded sequence of requests and arrivals.
// The same population, seed and stream always give the same sequence.
type Stream uint64

// The streams of a probe, separate so that a longer lead-in does not change the window's requests.
const (
	WarmUpStream Stream = iota + 1
	PrimeStream
	LeadInStream
	WindowStream
	RunOutStream
	PopulationStream // never sent: what the workload is like
)

// Draw returns another sequence of the same population and purpose; draw 0 is the stream itself. A measurement that is to be
// independent of an earlier one takes fresh draws, one that is to be compared with it takes the same.
func (s Stream) Draw(n int) Stream { return s | Stream(n)<<drawBits }

// drawBits keeps the number of a draw above the streams.
const drawBits = 8

// A Phase is the part of a probe in which a request is due.
type Phase uint8

// The phases in their order. Only requests of the Window are counted.
const (
	LeadIn Phase = iota
	Window
	RunOut
)

// String returns the phase as the design writes it.
func (p Phase) String() string {
	return [...]string{"lead-in", "window", "run-out"}[p]
}

// Asap is the due time of a request in a closed loop: it is due when a request in flight ends and leaves it its place.
const Asap time.Duration = -1

// An Arrival is one request with the time at which it is due.
type Arrival struct {
	Due     time.Duration // since the start of the probe, or Asap
	Phase   Phase
	Index   int // 0-based within its phase
	Request *Request
}

// A Source is where the requests of a study come from.
type Source interface {
	// Name describes the source in a few words for reports, such as "phase1 (300 requests)".
	Name() string
	// Len returns how many different requests the source has before it repeats; 0 means endless.
	Len() int
	// Request returns the i-th request of the stream, i >= 0. The i-th and the (i+Len)-th of a finite source are the same,
	// unless its repetitions are salted. It may be called from several goroutines.
	Request(stream Stream, i int) *Request
	// Longest returns the largest prompt plus output in tokens that the source can draw; 0 when unknown.
	Longest() int
}

// A Plan is the load of one probe: a lead-in that is not counted, a window that is, and a run-out that goes on until
// the caller stops reading. Arrivals are Poisson unless it says otherwise.
type Plan struct {
	Source      Source
	Seed        uint64        // of the arrivals
	Rate        float64       // requests per second, > 0
	LeadIn      time.Duration // uncounted load before the window
	Window      time.Duration // the window lasts at least this long
	MinRequests int           // and until at least this many requests are due in it
	Arrivals    Arrivals      // how the gaps between arrivals are spread
	Draw        int           // which of the independent draws of requests and arrivals, from 0

	// Rescale makes the arrivals those of vllm bench serve (get_request in vllm/benchmarks/serve.py, 0.14.1 and 0.33): exactly
	// MinRequests, all counted, their times stretched so that the last one is due at MinRequests/Rate. There is no lead-in and
	// no run-out then, and LeadIn and Window are not used.
	Rescale bool
}

// A Pass is one uncounted run through the first N requests of a stream, to bring a cache into its state.
type Pass struct {
	Source Source
	Seed   uint64
	Stream Stream
	Rate   float64
	First  int // index of the first request
	N      int
}

// Schedule is what a Load sends: arrivals in the order of their due times. It ends by itself, or it goes on for ever
// with requests of the RunOut phase.
type Schedule = iter.Seq[Arrival]
