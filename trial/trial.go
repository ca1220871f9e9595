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

// A Server is one running inference server. A function of type Start returns it when it is ready for requests.
type Server interface {
	// Facts returns what the server reported about itself during its start.
	Facts() serverctl.Facts
	// Counters reads the current values of the server's counters.
	Counters(ctx context.Context) (serverctl.Counters, error)
	// ResetCache empties the prefix cache and checks that it is empty. The server must be idle.
	ResetCache(ctx context.Context) error
	// Drain waits until the server has no running or waiting request. It returns how long that took.
	Drain(ctx context.Context) (time.Duration, error)
	// Exited is closed if the server ends or becomes useless before Stop is called.
	Exited() <-chan struct{}
	// Err returns a *serverctl.ExitError that says why Exited was closed.
	Err() error
	// Observe records once a second what the server does, until the caller calls endSeries. The times in the series
	// count from begin. If nothing can be recorded, as in virtual time, endSeries returns nil.
	Observe(begin time.Time) (endSeries func() *serverctl.Series)
	// Stop ends the server and waits until its processes are gone and its resources are free. It returns how the server
	// ended. A second call is safe.
	Stop(ctx context.Context) (serverctl.Ended, error)
}

// A Load sends the requests of a schedule to the server, and returns the samples of those that count.
type Load interface {
	Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error)
}

// A ClosedLoad can also send a closed loop. It keeps as many requests in flight as there are streams. The schedule of a
// closed loop comes from a workload.Loop.
type ClosedLoad interface {
	RunClosed(ctx context.Context, schedule workload.Schedule, streams int, stop bench.Stop) (bench.Run, error)
}

// A Start starts one server with the args of a point. It returns the server when it is ready, and a Load that sends
// requests to it. If the server dies or refuses its args, the error is a *serverctl.ExitError.
type Start func(ctx context.Context, launch Launch) (Server, Load, error)

// A Launch says which server to start.
type Launch struct {
	Number   int               // number of the trial
	Args     []string          // all args after the model's name
	Env      map[string]string // environment variables of the point, which override those of every trial
	Progress func(step string) // called with the name of each step when it begins; never nil
}

// A Probe is one measured load. The store keeps it in this form.
type Probe struct {
	Seq         int               `json:"seq"`               // index within the trial, from 0
	Rate        float64           `json:"rate"`              // requests per second; 0 in a closed loop
	Streams     int               `json:"streams,omitempty"` // requests in flight in a closed loop
	Verdict     slo.Verdict       `json:"verdict"`
	Measurement bench.Measurement `json:"measurement"`
	HitRate     float64           `json:"hit_rate"`          // prefix-cache hits / queries over the probe; -1 when unknown
	Preemptions float64           `json:"preemptions"`       // number of preemptions during the probe
	Stopped     bool              `json:"stopped"`           // ended early, because it could no longer pass
	Attempt     int               `json:"attempt,omitempty"` // number of the server start within the trial, from 0
	Note        string            `json:"note,omitempty"`
	GPUTime     time.Duration     `json:"gpu_time_ns"`           // lead-in, window, run-out and drain, plus Replaced
	Replaced    time.Duration     `json:"replaced_ns,omitempty"` // GPU time of the earlier probe that this one replaces; 0 if it replaces none
	Spent       Spent             `json:"spent_ns,omitempty"`    // GPUTime divided into parts, plus the time to empty the cache; nil in trials of older tuners

	Speculation *Speculation      `json:"speculation,omitempty"` // nil if the server drafted nothing
	Server      *serverctl.Series `json:"server,omitempty"`      // what the server did, on the clock of the Measurement's series
}

// Speculation counts the draft tokens of speculative decoding in one probe.
type Speculation struct {
	Drafts   float64   `json:"drafts"`       // number of drafts
	Tokens   float64   `json:"draft_tokens"` // drafted tokens
	Accepted float64   `json:"accepted_tokens"`
	At       []float64 `json:"accepted_at"` // accepted tokens by position in the draft, from 0
}

// An Outcome says in one word how a trial ended.
type Outcome string

// The outcomes.
const (
	Measured   Outcome = "measured"   // the point has a capacity, or is known to have none
	Infeasible Outcome = "infeasible" // the server does not run with these flags
	Dropped    Outcome = "dropped"    // the trial ended early, because the point cannot be the best; the field Class tells why
	Unknown    Outcome = "unknown"    // the flags did not cause the failure, so the search learns nothing from it
)

// A Result is the result of one trial.
type Result struct {
	Outcome  Outcome           `json:"outcome"`
	Class    serverctl.Class   `json:"class,omitempty"`    // why the outcome is not Measured; a Measured trial has the class ClientLimited if the load generator limited its capacity
	Cause    serverctl.Cause   `json:"cause,omitempty"`    // more exact reason than the class; "" if it is not known
	Evidence string            `json:"evidence,omitempty"` // line of the log, or message, that shows the class
	Argparse bool              `json:"argparse,omitempty"` // the same as in serverctl.ExitError; false in trials of older tuners
	KVGiB    *float64          `json:"kv_gib,omitempty"`   // the same as in serverctl.ExitError; nil in trials of older tuners
	Tail     []string          `json:"tail,omitempty"`     // last lines of the server's log; empty if Measured
	Capacity capacity.Capacity `json:"capacity"`
	Cache    Protocol          `json:"cache,omitempty"` // how the trial treated the prefix cache; empty in trials of older tuners
	Facts    serverctl.Facts   `json:"facts"`
	Ended    serverctl.Ended   `json:"ended"`       // how the server ended
	GPUTime  time.Duration     `json:"gpu_time_ns"` // time of start, warm-up, priming, probes and stop
	// Spent divides time into parts. It has the time of all servers that this trial had in its last run, and the time
	// of the probes of earlier runs. It is nil in trials of older tuners.
	Spent Spent    `json:"spent_ns,omitempty"`
	Notes []string `json:"notes,omitempty"`
}
