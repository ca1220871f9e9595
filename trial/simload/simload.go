// Package simload is a trial's Server and Load over the simulator's virtual time, so that demo, tests and benchmarks run
// the very code of a real trial. It never waits: an hour of load takes as long as it takes to compute.
package simload

import (
	"context"
	"errors"
	"fmt"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
)

// A Rig starts simulated servers of one profile.
type Rig struct {
	Profile *sim.Profile
	ITL     bool // record the times between tokens

	prompts prompts
}

// Start is a trial.Start: it returns a simulated server, ready at once, and the load that reaches it.
func (r *Rig) Start(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, context.Cause(ctx)
	}
	options, err := r.Profile.ParseArgs(launch.Args)
	if err != nil {
		return nil, nil, refusal(err, 0)
	}
	engine, err := sim.NewEngine(r.Profile, options)
	if err != nil {
		return nil, nil, refusal(err, r.Profile.StartUp.Total())
	}
	engine.Seed, engine.Each = uint64(launch.Number), r.ITL
	s := &server{engine: engine, exited: make(chan struct{})}
	return s, &load{engine: engine, prompts: &r.prompts}, nil
}

// refusal gives a failed start the class that the log of a real server would show, and the time that a real one takes.
func refusal(err error, took time.Duration) error {
	exit := &serverctl.ExitError{Class: serverctl.FlagsRejected, Evidence: err.Error(), Code: 1, Tail: []string{err.Error()}, Took: took}
	if start, ok := errors.AsType[*sim.StartError](err); ok {
		exit.Class = serverctl.KVTooSmall
		if start.OOM {
			exit.Class = serverctl.OOMStart
		}
	}
	if _, ok := errors.AsType[*sim.UsageError](err); ok {
		exit.Code = 2
	}
	return exit
}

// A server is one simulated server, idle whenever no load runs.
type server struct {
	engine *sim.Engine
	exited chan struct{}
}

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
		AcceptedAt:       floats(t.AcceptedPerPos),
	}, nil
}

func floats(counts []int) []float64 {
	var fs []float64
	for _, n := range counts {
		fs = append(fs, float64(n))
	}
	return fs
}

func (s *server) ResetCache(context.Context) error {
	if !s.engine.ResetCache() {
		return errors.New("some blocks are not freed yet")
	}
	return nil
}

// Drain has nothing to wait for: a load returns with the engine idle.
func (s *server) Drain(context.Context) (time.Duration, error) {
	if !s.engine.Idle() {
		return 0, fmt.Errorf("%d requests run and %d wait though no load is on", s.engine.Running(), s.engine.Waiting())
	}
	return 0, nil
}

func (s *server) Exited() <-chan struct{} { return s.exited }

func (s *server) Err() error { return nil }

// Observe sees nothing: a whole load is one moment of real time.
func (s *server) Observe(time.Time) func() *serverctl.Series {
	return func() *serverctl.Series { return nil }
}

func (s *server) Stop(context.Context) (serverctl.Ended, error) {
	return serverctl.Ended{Took: s.engine.Profile.StopTime()}, nil
}
