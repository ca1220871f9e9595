// Package simload provides the Server and the Load of a trial in the simulator's virtual time. Demos, tests and
// benchmarks thus run the code of a real trial. Package simload never waits: an hour of load takes only the time to
// compute it.
package simload

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/samber/lo"

	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
)

// A Rig starts simulated servers of one profile.
type Rig struct {
	Profile *sim.Profile
	ITL     bool // whether to record the times between tokens (inter-token latencies)

	prompts prompts
}

// Start is a trial.Start: it returns a simulated server, which is ready at once, and its load.
func (r *Rig) Start(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, context.Cause(ctx)
	}
	options, err := r.Profile.ParseArgs(launch.Args)
	if err != nil {
		return nil, nil, startError(err, 0)
	}
	engine, err := sim.NewEngine(r.Profile, options)
	if err != nil {
		return nil, nil, startError(err, r.Profile.StartUp.Total())
	}
	engine.Seed, engine.Each = uint64(launch.Number), r.ITL
	return &server{engine}, &load{engine: engine, prompts: &r.prompts}, nil
}

// startError returns the error of a failed start. That error has the class that a real server's log would show, and the
// time that a real start takes.
func startError(err error, took time.Duration) error {
	exit := &serverctl.ExitError{Class: serverctl.FlagsRejected, Evidence: err.Error(), Code: 1, Tail: []string{err.Error()}, Took: took}
	if start, ok := errors.AsType[*sim.StartError](err); ok {
		exit.Class, exit.KVGiB = serverctl.KVTooSmall, start.KVGiB
		if start.OOM {
			exit.Class = serverctl.OOMStart
		}
	}
	if _, ok := errors.AsType[*sim.UsageError](err); ok {
		exit.Code, exit.Argparse = 2, true
	}
	return exit
}

// A server is one simulated server. It is idle while no load runs, and it never dies.
type server struct{ engine *sim.Engine }

func (s *server) Facts() serverctl.Facts {
	p, o := s.engine.Profile, s.engine.Options
	return serverctl.Facts{
		Version:        "simulated " + p.Name,
		KVCacheTokens:  s.engine.KVTokens(),
		KVCacheGiB:     p.KVGiB(o),
		MaxConcurrency: float64(s.engine.KVTokens()) / float64(o.MaxModelLen),
		MaxModelLen:    o.MaxModelLen,
		StartUp:        p.StartUp.Total(),
		Simulated:      true,
		Virtual:        true,
	}
}

func (s *server) Counters(context.Context) (serverctl.Counters, error) {
	t := s.engine.Totals
	return serverctl.Counters{
		Running:          float64(s.engine.Running()),
		Waiting:          float64(s.engine.Waiting()),
		KVUsage:          s.engine.KVUsage(),
		PrefixQueries:    float64(t.PrefixQueries),
		PrefixHits:       float64(t.PrefixHits),
		Preemptions:      float64(t.Preemptions),
		PromptTokens:     float64(t.PromptTokens),
		GenerationTokens: float64(t.GenerationTokens),
		Drafts:           float64(t.Drafts),
		DraftTokens:      float64(t.DraftTokens),
		AcceptedTokens:   float64(t.AcceptedTokens),
		AcceptedAt:       lo.Map(t.AcceptedPerPos, func(n, _ int) float64 { return float64(n) }),
	}, nil
}

func (s *server) ResetCache(context.Context) error {
	if !s.engine.ResetCache() {
		return errors.New("some blocks are not freed yet")
	}
	return nil
}

// Drain returns at once, because a load leaves the engine idle.
func (s *server) Drain(context.Context) (time.Duration, error) {
	if !s.engine.Idle() {
		return 0, fmt.Errorf("%d requests run and %d wait although there is no load", s.engine.Running(), s.engine.Waiting())
	}
	return 0, nil
}

func (s *server) Exited() <-chan struct{} { return nil }

func (s *server) Err() error { return nil }

// Observe returns no series, because a whole load takes almost no real time.
func (s *server) Observe(time.Time) func() *serverctl.Series {
	return func() *serverctl.Series { return nil }
}

func (s *server) Stop(context.Context) (serverctl.Ended, error) {
	return serverctl.Ended{Took: s.engine.Profile.StopTime()}, nil
}
