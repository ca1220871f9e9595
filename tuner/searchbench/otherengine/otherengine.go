// Package otherengine simulates an inference server in virtual time. It shares no code and no equations with
// serverctl/sim. Tests use this engine to see whether a search works only with the equations of serverctl/sim. It never
// takes real time.
package otherengine

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A Machine is one model on one GPU. All memory is given as the number of KV cache tokens that it could hold.
type Machine struct {
	Name string

	Memory   float64 // memory of the GPU
	Weights  float64 // memory for the weights
	PerSeq   float64 // memory for each of the max-num-seqs sequences
	PerBatch float64 // memory for each of the max-num-batched-tokens tokens

	// A start runs out of memory when util·OOMUtil + seqs·OOMSeqs + batch·OOMBatch is above 1. In these formulas util
	// is gpu-memory-utilization, seqs is max-num-seqs and batch is max-num-batched-tokens.
	OOMUtil, OOMSeqs, OOMBatch float64

	// While b requests decode, all of them together get Decode·b/(b+Half) tokens per second, in equal parts.
	Decode, Half float64
	// The engine prefills one prompt at a time, at Prefill·batch/(batch+Chunk) tokens per second. Meanwhile the speed
	// of decoding falls by the fraction batch/(batch+Share).
	Prefill, Chunk, Share float64

	PauseEvery float64 // mean time between two pauses, seconds; 0 means no pauses; the engine computes nothing in a pause
	PauseLeast float64 // shortest pause, seconds
	PauseMost  float64 // longest pause, seconds

	NoCache     bool // no prefix cache
	Seqs        int  // default of max-num-seqs
	Batch       int  // default of max-num-batched-tokens
	MaxModelLen int  // default of max-model-len
	StartUp     time.Duration
	Stop        time.Duration
}

// flags are the args of one server.
type flags struct {
	util        float64
	seqs, batch float64
	maxModelLen int
}

func (m *Machine) parse(args []string) (flags, error) {
	f := flags{0.9, float64(m.Seqs), float64(m.Batch), m.MaxModelLen}
	for name, text := range space.FlagValues(args) {
		value, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return f, fmt.Errorf("--%s %s: %w", name, text, err)
		}
		switch name {
		case "gpu-memory-utilization":
			f.util = value
		case "max-num-seqs":
			f.seqs = value
		case "max-num-batched-tokens":
			f.batch = value
		case "max-model-len":
			f.maxModelLen = int(value)
		default:
			return f, fmt.Errorf("unrecognized arguments: --%s", name)
		}
	}
	return f, nil
}

// kvTokens returns the size of the KV cache in tokens.
func (m *Machine) kvTokens(f flags) float64 {
	return f.util*m.Memory - m.Weights - m.PerSeq*f.seqs - m.PerBatch*f.batch
}

// check returns the error of a start with these flags; nil if the server starts.
func (m *Machine) check(f flags) *serverctl.ExitError {
	exit := func(class serverctl.Class, format string, args ...any) *serverctl.ExitError {
		text := fmt.Sprintf(format, args...)
		return &serverctl.ExitError{Class: class, Evidence: text, Code: 1, Tail: []string{text}, Took: m.StartUp}
	}
	switch {
	case f.util*m.OOMUtil+f.seqs*m.OOMSeqs+f.batch*m.OOMBatch > 1:
		return exit(serverctl.OOMStart, "out of memory: util %g, seqs %g, batch %g", f.util, f.seqs, f.batch)
	case m.kvTokens(f) < float64(f.maxModelLen):
		return exit(serverctl.KVTooSmall, "%.0f tokens of KV cache are too few for a request of %d", m.kvTokens(f), f.maxModelLen)
	}
	return nil
}

// Start is a trial.Start: it returns a simulated server, which is ready at once, and its load.
func (m *Machine) Start(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, context.Cause(ctx)
	}
	f, err := m.parse(launch.Args)
	if err != nil {
		return nil, nil, &serverctl.ExitError{Class: serverctl.FlagsRejected, Evidence: err.Error(), Argparse: true, Code: 2, Tail: []string{err.Error()}}
	}
	if exit := m.check(f); exit != nil {
		return nil, nil, exit
	}
	e := newEngine(m, f, uint64(launch.Number))
	return &server{e}, &load{e}, nil
}

// A server is one started engine. It never dies.
type server struct{ *engine }

func (s *server) Facts() serverctl.Facts {
	return serverctl.Facts{
		Version: "other engine " + s.machine.Name, KVCacheTokens: int(s.room), MaxModelLen: s.flags.maxModelLen,
		StartUp: s.machine.StartUp, Simulated: true, Virtual: true,
	}
}

func (s *server) Counters(context.Context) (serverctl.Counters, error) { return s.counters, nil }

func (s *server) ResetCache(context.Context) error {
	if !s.idle() {
		return errors.New("requests are running")
	}
	s.cache.keep(0)
	return nil
}

// Drain returns at once, because a load leaves the engine idle.
func (s *server) Drain(context.Context) (time.Duration, error) { return 0, nil }

func (s *server) Exited() <-chan struct{} { return nil }

func (s *server) Err() error { return nil }

// Observe returns no series, because a whole load takes almost no real time.
func (s *server) Observe(time.Time) func() *serverctl.Series {
	return func() *serverctl.Series { return nil }
}

func (s *server) Stop(context.Context) (serverctl.Ended, error) {
	return serverctl.Ended{Took: s.machine.Stop}, nil
}
