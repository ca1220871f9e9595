package vllm

import (
	"context"
	"errors"

	"vllmtuner/serverctl/sim"
)

// A startPoint is a moment during the start of a server at which faults act.
type startPoint int

const (
	never           startPoint = iota
	atBegin                    // in the API server, after it has read its flags and before it binds its port
	whileLoading               // in the engine, before it loads the weights
	whileProfiling             // in the engine, before it sizes its KV cache
	beforeListening            // in the API server, when its engine is ready
)

// A startAction is what a fault does at its startPoint. An error ends the process.
type startAction func(ctx context.Context, s *Server, o sim.Options, f Fault, log *logger) error

// errKilled is the error of an engine that dies without a log line, as after SIGKILL.
var errKilled = errors.New("killed by signal 9")

// applyFaults applies, in their order, the faults that act at a startPoint and have no trigger.
func (s *Server) applyFaults(ctx context.Context, at startPoint, o sim.Options, log *logger) error {
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

// raise ends the process with the fault's exception.
func raise(_ context.Context, s *Server, o sim.Options, f Fault, _ *logger) error {
	return &sim.StartError{Text: deathOf(f, s.Profile, o)}
}

// killEngine ends the engine without a log line, as SIGKILL does.
func killEngine(context.Context, *Server, sim.Options, Fault, *logger) error { return errKilled }

// delay waits for the time f.For; if that is 0, it waits for ever.
func delay(ctx context.Context, _ *Server, _ sim.Options, f Fault, _ *logger) error {
	if f.For > 0 {
		return wait(ctx, f.For.Seconds())
	}
	<-ctx.Done()
	return context.Cause(ctx)
}
