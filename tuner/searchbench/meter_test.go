package searchbench

import (
	"context"
	"errors"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

var background = context.Background()

// gpuTimes is the GPU time of a method's servers, split by purpose.
type gpuTimes struct {
	Start, Stop            time.Duration
	WarmUp                 time.Duration // load outside probes: warm-up, priming and the worst case
	LeadIn, Window, RunOut time.Duration // the parts of probes
}

func (s gpuTimes) total() time.Duration {
	return s.Start + s.Stop + s.WarmUp + s.LeadIn + s.Window + s.RunOut
}

// A meter counts the GPU time of all servers that it starts, without using the counts of the code that it measures.
type meter struct {
	start  trial.Start
	manual bool // whether every load is a probe, because the method neither warms up nor primes
	spent  gpuTimes
}

// Start has the type trial.Start. It starts a server, and counts how long the server takes to start.
func (m *meter) Start(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
	server, load, err := m.start(ctx, launch)
	if err != nil {
		if exit, ok := errors.AsType[*serverctl.ExitError](err); ok {
			m.spent.Start += exit.Took
		}
		return nil, nil, err
	}
	m.spent.Start += server.Facts().StartUp
	return &meteredServer{server, m}, &meteredLoad{load, m}, nil
}

type meteredServer struct {
	trial.Server
	meter *meter
}

func (s *meteredServer) Drain(ctx context.Context) (time.Duration, error) {
	took, err := s.Server.Drain(ctx)
	s.meter.spent.RunOut += took
	return took, err
}

func (s *meteredServer) Stop(ctx context.Context) (serverctl.Ended, error) {
	ended, err := s.Server.Stop(ctx)
	s.meter.spent.Stop += ended.Took
	return ended, err
}

type meteredLoad struct {
	trial.Load
	meter *meter
}

// Run counts a load by its phases. A probe has a lead-in and a window. Every other load has only one of them.
func (l *meteredLoad) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	leads, counted := 0, 0
	var first, last time.Duration
	watched := func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			switch {
			case a.Phase == workload.LeadIn:
				leads++
			case a.Phase == workload.Window && counted == 0:
				first, last = a.Due, a.Due
				counted++
			case a.Phase == workload.Window:
				last = a.Due
				counted++
			}
			if !yield(a) {
				return
			}
		}
	}
	run, err := l.Load.Run(ctx, watched, stop)
	s := &l.meter.spent
	if !l.meter.manual && (leads == 0 || counted == 0) {
		s.WarmUp += run.Elapsed
		return run, err
	}
	first, last = min(first, run.Elapsed), min(last, run.Elapsed)
	s.LeadIn += first
	s.Window += last - first
	s.RunOut += run.Elapsed - last
	return run, err
}
