// Package trial measures one point: it starts a server, warms it up, probes it, stops it, and returns one result with
// its diagnosis. It never stores anything itself.
package trial

import (
	"context"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A Server is one running inference server. It is ready when a Start returns it.
type Server interface {
	// Facts returns what the server reported about itself during its start.
	Facts() serverctl.Facts
	// Counters reads the server's counters now.
	Counters(ctx context.Context) (serverctl.Counters, error)
	// ResetCache empties the prefix cache and checks that it is empty. The server must be idle.
	ResetCache(ctx context.Context) error
	// Drain waits until no request runs or waits, and returns how long that took.
	Drain(ctx context.Context) (time.Duration, error)
	// Exited is closed when the server has died, or has become useless without our doing.
	Exited() <-chan struct{}
	// Err returns why, once Exited is closed; a *serverctl.ExitError.
	Err() error
	// Observe records once a second what the server does, in time from begin, until end is called. end returns nil
	// where there is nothing to record, as in virtual time.
	Observe(begin time.Time) (end func() *serverctl.Series)
	// Stop ends the server, waits until it is gone with everything that it held, and tells how that went. It is safe to
	// call twice.
	Stop(ctx context.Context) (serverctl.Ended, error)
}

// A Load sends a schedule to the server and returns what happened to the counted requests.
type Load interface {
	Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error)
}

// A ClosedLoad can also keep a number of requests in flight, the streams, as a workload.Loop wants it.
type ClosedLoad interface {
	RunClosed(ctx context.Context, schedule workload.Schedule, streams int, stop bench.Stop) (bench.Run, error)
}

// A Start starts one server with the args of a point and returns it when it is ready, with the load that reaches it.
// Where the server dies or refuses its args, the error is a *serverctl.ExitError.
type Start func(ctx context.Context, launch Launch) (Server, Load, error)

// A Launch says what to start.
type Launch struct {
	Number   int               // of the trial
	Args     []string          // all args after the model
	Progress func(step string) // called with the name of each step as it begins; never nil
}

// A Probe is one measured rate. It is stored as it is.
type Probe struct {
	Seq         int               `json:"seq"`               // 0-based within the trial
	Rate        float64           `json:"rate"`              // requests per second; 0 in a closed loop
	Streams     int               `json:"streams,omitempty"` // requests in flight in a closed loop
	Verdict     slo.Verdict       `json:"verdict"`
	Measurement bench.Measurement `json:"measurement"`
	HitRate     float64           `json:"hit_rate"`          // prefix-cache hits / queries over the probe; -1 when unknown
	Preemptions float64           `json:"preemptions"`       // over the probe
	Stopped     bool              `json:"stopped"`           // ended early, because it had failed already
	Attempt     int               `json:"attempt,omitempty"` // number of the server that was started for the trial, from 0
	Note        string            `json:"note,omitempty"`
	GPUTime     time.Duration     `json:"gpu_time_ns"`           // lead-in, window, run-out and drain, plus Replaced
	Replaced    time.Duration     `json:"replaced_ns,omitempty"` // GPU time of the probe that this one repeats and replaces; 0 when there is none

	Speculation *Speculation      `json:"speculation,omitempty"` // nil where nothing was drafted
	Server      *serverctl.Series `json:"server,omitempty"`      // what the server did, on the clock of the Measurement's series
}

// Speculation counts what a server drafted in a probe, and what of it was accepted.
type Speculation struct {
	Drafts   float64   `json:"drafts"`       // number of drafts
	Tokens   float64   `json:"draft_tokens"` // drafted tokens
	Accepted float64   `json:"accepted_tokens"`
	At       []float64 `json:"accepted_at"` // accepted tokens by position in the draft, from 0
}

// An Outcome says how a trial ended.
type Outcome string

// The outcomes.
const (
	Measured   Outcome = "measured"   // the point has a capacity, or is known to have none
	Infeasible Outcome = "infeasible" // the server does not run with these flags
	Dropped    Outcome = "dropped"    // the trial ended early, because the point cannot be the best; the class tells why
	Unknown    Outcome = "unknown"    // the trial failed, but not by its flags; it tells the search nothing
)

// A Result is what one trial found.
type Result struct {
	Outcome  Outcome           `json:"outcome"`
	Class    serverctl.Class   `json:"class,omitempty"`    // why it was not Measured; ClientLimited also where the load generator decided the capacity
	Cause    serverctl.Cause   `json:"cause,omitempty"`    // more exact than the class, where it is known
	Evidence string            `json:"evidence,omitempty"` // the line of the log, or the message, that shows the class
	Tail     []string          `json:"tail,omitempty"`     // last lines of the server's log, unless Measured
	Capacity capacity.Capacity `json:"capacity"`
	Cache    Protocol          `json:"cache,omitempty"` // how the trial treated the prefix cache; empty in trials of older tuners
	Facts    serverctl.Facts   `json:"facts"`
	Ended    serverctl.Ended   `json:"ended"`       // how the server ended
	GPUTime  time.Duration     `json:"gpu_time_ns"` // time of start, warm-up, priming, probes and stop
	Notes    []string          `json:"notes,omitempty"`
}
