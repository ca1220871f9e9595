// Package vllm is `vllm serve` without a GPU, in real time. It runs the engine of serverctl/sim. Around the engine it
// simulates the HTTP API, the log, the metrics, the processes and the failures of three versions of vLLM. It knows nothing
// of the tuner.
package vllm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"golang.org/x/net/netutil"

	"vllmtuner/render"
	"vllmtuner/serverctl/sim"
)

// stopGrace is how long a stopping server waits for its handlers.
const stopGrace = 5 * time.Second

// A Server is `vllm serve` on a simulated GPU. With only Profile and Out set, it is a healthy server in one process.
type Server struct {
	Profile *sim.Profile
	Version string // version of vLLM; empty means the first of sim.Versions
	Faults  Faults

	// EngineProcess runs the engine in a process of its own, as vLLM does. Reexec must then be set.
	EngineProcess bool
	// GPU is a directory that stands for the GPU's memory. If it is empty, the server does not count memory.
	GPU string
	// Reexec is the beginning of a command line that runs this program as an engine or a child, such as [tuner sim].
	// The server appends engine or child and their args. The program that runs is always /proc/self/exe, whatever the
	// first word is.
	Reexec []string

	Out io.Writer // vLLM's log
	Err io.Writer // what Python writes to its standard error; nil means Out

	watchdog time.Duration // how long the API server outlives its engine; 0 means watchdogTime; for tests
}

// Serve reads vLLM's args, logs the start, waits as long as the profile's start takes, and answers HTTP. It ends when
// ctx ends, a fault ends it, or its engine dies. It returns nil when vLLM would exit with 0, as after the death of the
// engine. For an error, ExitCode returns vLLM's exit code. Serve has logged the error as vLLM does, unless it is a
// *FaultError.
func (s *Server) Serve(ctx context.Context, args []string) error {
	began := time.Now()
	if err := s.check(); err != nil {
		return err
	}
	log := s.logger()
	err := s.serve(ctx, args, began, log)
	if ctx.Err() == nil {
		log.refusal(err)
	}
	return err
}

func (s *Server) logger() *logger {
	if s.Err == nil {
		s.Err = s.Out
	}
	return newLogger(s.Out, s.Err, releaseOf(sim.Options{Version: s.Version}))
}

func (s *Server) version() string { return cmp.Or(s.Version, sim.Versions[0]) }

// check refuses a fault if a setting that the fault needs is missing.
func (s *Server) check() error {
	if _, ok := s.Faults.find("leak-gpu"); ok && s.GPU == "" {
		return &FaultError{"fault leak-gpu needs a simulated GPU: give --sim-gpu DIR"}
	}
	if s.Reexec != nil {
		return nil
	}
	for _, kind := range []string{"daemon", "zombies"} {
		if _, ok := s.Faults.find(kind); ok {
			return &FaultError{fmt.Sprintf("fault %s needs Server.Reexec, to start a process", kind)}
		}
	}
	if s.EngineProcess {
		return &FaultError{"the engine process needs Server.Reexec, to start it"}
	}
	return nil
}

// serve runs the server from its start to its end.
func (s *Server) serve(ctx context.Context, args []string, began time.Time, log *logger) error {
	options, err := s.Profile.ParseArgsOf(s.version(), args)
	if err != nil {
		return err
	}
	log.introduce(options)
	log.api("non-default args: %s", nonDefault(options))
	if err := s.applyFaults(ctx, atBegin, options, log); err != nil {
		return err
	}
	_, late := s.Faults.find("bind-late")
	var port *socket
	if !late {
		if port, err = bind(options.Host, options.Port); err != nil {
			return err
		}
		defer port.close()
	}
	core, err := s.startEngine(ctx, args, options, log)
	if err != nil {
		return err
	}
	defer core.stop()
	log.engineReady(net.JoinHostPort(options.Host, strconv.Itoa(options.Port)))
	if err := s.applyFaults(ctx, beforeListening, options, log); err != nil {
		return err
	}
	if late {
		if port, err = bind(options.Host, options.Port); err != nil {
			return err
		}
		defer port.close()
	}
	listener, err := port.listen()
	if err != nil {
		return err
	}
	engine, err := sim.NewEngine(s.Profile, options)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	return s.serveHTTP(ctx, newFaultHandler(s, core, newLive(engine), log, began), listener)
}

// startUp starts the engine and returns the GPU memory that the engine holds.
func (s *Server) startUp(ctx context.Context, o sim.Options, log *logger) (*memory, error) {
	log.engine("Initializing a V1 LLM engine (v%s) with config: model='%s', simulated profile %s",
		log.release.version, o.Source(), s.Profile.Name)
	m, err := s.claim(o)
	if err != nil {
		return nil, err
	}
	err = s.loadWeights(ctx, o, m, log)
	if err == nil {
		err = s.sizeCache(ctx, o, m, log)
	}
	if err != nil {
		m.release()
		return nil, err
	}
	return m, nil
}

// loadWeights simulates the phases of a start up to the profile run. It waits as long as each phase takes, and logs the
// phase.
func (s *Server) loadWeights(ctx context.Context, o sim.Options, m *memory, log *logger) error {
	p, t := s.Profile, s.Profile.StartUp
	// On a GPU the second model runner (v1/worker/gpu/model_runner.py) is the default, and logs this text.
	if log.release.since032 {
		log.engine("Loading model from scratch...")
	} else {
		log.engine("Starting to load model %s...", o.Source())
	}
	if err := s.applyFaults(ctx, whileLoading, o, log); err != nil {
		return err
	}
	if err := errors.Join(m.hold(p.Memory.FixedGiB*1024), wait(ctx, t.Weights)); err != nil {
		return err
	}
	log.engine("Model loading took %s GiB memory and %.6f seconds", roundGiB(p.Memory.FixedGiB), t.Weights)
	log.engine("Using cache directory: /tmp/vllm/torch_compile_cache/simulated/rank_0_0/backbone for vLLM's torch.compile")
	if err := wait(ctx, t.Compile+t.Profile); err != nil {
		return err
	}
	takes := "takes"
	if log.release.since032 {
		takes = "took"
	}
	log.engine("torch.compile %s %.2f s in total", takes, t.Compile)
	return errors.Join(s.applyFaults(ctx, whileProfiling, o, log), m.disturbed())
}

// sizeCache simulates the last phases of a start: the KV cache and the CUDA graphs. As in vLLM, these phases come after
// the weights are loaded. So a start whose KV cache is too small fails late.
func (s *Server) sizeCache(ctx context.Context, o sim.Options, m *memory, log *logger) error {
	p, t := s.Profile, s.Profile.StartUp
	log.engine("Available KV cache memory: %s GiB", roundGiB(p.KVGiB(o)))
	tokens, err := p.KVTokens(o)
	if err != nil {
		return err
	}
	concurrency := float64(tokens) / float64(o.MaxModelLen)
	size := fmt.Sprintf("GPU KV cache size: %s tokens", render.Thousands(float64(tokens)))
	fits := fmt.Sprintf("Maximum concurrency for %s tokens per request: %.2fx", render.Thousands(float64(o.MaxModelLen)), concurrency)
	if log.release.since032 {
		log.engine("%s, %s", size, fits)
	} else {
		log.engine("%s", size)
		log.engine("%s", fits)
	}
	if err := errors.Join(m.hold(o.GPUMemoryUtilization*p.Memory.GPUGiB*1024), wait(ctx, t.Graphs)); err != nil {
		return err
	}
	log.engine("Graph capturing finished in %.0f secs, took %.2f GiB", t.Graphs, p.Memory.GraphReserveGiB)
	return nil
}

// serveHTTP answers requests until the server ends.
func (s *Server) serveHTTP(ctx context.Context, h *faultHandler, listener net.Listener) error {
	engineCtx, stopEngine := context.WithCancel(context.WithoutCancel(ctx))
	engineGone := make(chan struct{})
	go func() {
		defer close(engineGone)
		h.live.run(engineCtx)
	}()
	defer func() {
		stopEngine()
		<-engineGone
	}()
	handlersCtx, dropHandlers := context.WithCancelCause(context.WithoutCancel(ctx))
	defer dropHandlers(nil)
	server := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHead,
		BaseContext:       func(net.Listener) context.Context { return handlersCtx },
	}
	h.log.uvicorn("Application startup complete.")
	served := make(chan error, 1)
	go func() { served <- server.Serve(netutil.LimitListener(listener, maxConns)) }() // ends when the server is closed below
	h.open(dropHandlers)
	defer h.close()
	select {
	case err := <-served:
		return err
	case <-h.ended: // a fault has ended the server, or its engine died a while ago
	case <-ctx.Done():
		h.log.stopping()
		if slow, ok := s.Faults.find("slow-stop"); ok {
			time.Sleep(slow.For)
		}
		stopEngine()
		h.close() // the handler is closed before the engine stops, or it would count the engine as dead
		h.core.stop()
	}
	h.log.uvicorn("Shutting down")
	s.shutdown(context.WithoutCancel(ctx), server, dropHandlers, h)
	<-served
	return nil
}

// shutdown lets the handlers end within stopGrace. With the fault named hang-on-connections, the server waits for the
// clients without a limit, as uvicorn does in vLLM 0.14.1 (vllm/entrypoints/launcher.py). Then no stream ends, because
// the engine has ended. With eight streams in flight, two of three real servers waited for more than 85 s.
func (s *Server) shutdown(ctx context.Context, server *http.Server, dropHandlers context.CancelCauseFunc, h *faultHandler) {
	if h.abrupt { // the server ends abruptly, because a graceful end would complete the answers
		_ = server.Close() // a listener is closed even when Close fails
		return
	}
	if _, ok := s.Faults.find("hang-on-connections"); ok {
		h.log.uvicorn("Waiting for connections to close. (CTRL+C to force quit)")
		_ = server.Shutdown(ctx) // fails only when ctx ends; this ctx never does
		return
	}
	dropHandlers(nil)
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	if server.Shutdown(ctx) != nil {
		_ = server.Close() // a listener is closed even when Close fails
	}
}

// ExitCode returns vLLM's exit code for an error of Serve: 2 for a wrong command line, otherwise 1.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	if _, ok := errors.AsType[*sim.UsageError](err); ok {
		return 2
	}
	return 1
}

// refusal logs the text that vLLM logs before it exits with an error. serverctl reads this text.
func (l *logger) refusal(err error) {
	usage, isUsage := errors.AsType[*sim.UsageError](err)
	config, isConfig := errors.AsType[*sim.ConfigError](err)
	core, isCore := errors.AsType[*coreError](err)
	start, isStart := errors.AsType[*sim.StartError](err)
	switch {
	case err == nil:
	case isUsage:
		l.write(l.errors, "", "usage: vllm serve [model_tag] [options]\n"+usage.Error())
	case isConfig:
		l.apiFailed(deathText("invalid-flags", fields{"error": config.Text}))
	case isCore:
		l.apiFailed(l.release.initFailed(core.exit))
	case isStart:
		l.apiFailed(start.Text)
	default:
		l.write(l.errors, "", "the simulated server: "+err.Error())
	}
}

func wait(ctx context.Context, s float64) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(sim.Seconds(s)):
		return nil
	}
}
