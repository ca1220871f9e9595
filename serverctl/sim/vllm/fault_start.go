package vllm

import (
	"context"
	"errors"
	"time"

	"vllmtuner/serverctl/sim"
)

// A point is a place on the way to readiness at which faults strike.
type point int

const (
	nowhere         point = iota
	atBegin               // the API server, when its flags are read and nothing is bound
	whileLoading          // the engine, before its weights
	whileProfiling        // the engine, before it sizes its KV cache
	beforeListening       // the API server, when its engine is ready
)

// A startAction is what a fault does at its point; its error ends the process.
type startAction func(ctx context.Context, s *Server, o sim.Options, f Fault, log *logger) error

// errVanished is an engine that dies without a word, as of SIGKILL.
var errVanished = errors.New("killed by signal 9")

// strike lets the faults of a point act, in their order.
func (s *Server) strike(ctx context.Context, at point, o sim.Options, log *logger) error {
	for _, f := range s.Faults {
		if f.kind.point != at || f.Trigger != "" {
			continue
		}
		if err := f.kind.start(ctx, s, o, f, log); err != nil {
			return err
		}
	}
	return nil
}

// dies ends the process with its exception.
func dies(_ context.Context, s *Server, o sim.Options, f Fault, _ *logger) error {
	return &sim.StartError{Text: f.kind.last(s.Profile, o)}
}

// vanishes ends the engine without a word.
func vanishes(context.Context, *Server, sim.Options, Fault, *logger) error { return errVanished }

// lingers takes its time, or all the time there is.
func lingers(ctx context.Context, _ *Server, _ sim.Options, f Fault, _ *logger) error {
	var over <-chan time.Time
	if f.For > 0 {
		over = time.After(f.For)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-over:
		return nil
	}
}
