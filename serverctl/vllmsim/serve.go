package vllmsim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Version is the vLLM whose face the HTTP server has.
const Version = "0.14.1"

// stopGrace is how long a stopping server waits for its handlers.
const stopGrace = 5 * time.Second

// A Server is `vllm serve` on a simulated GPU. The zero value but for Profile and Out is a healthy one in one process.
type Server struct {
	Profile *Profile
	Faults  Faults // what goes wrong, and when

	// EngineProcess gives the engine a process of its own, as vLLM's has; Reexec must be set.
	EngineProcess bool
	// GPU is a directory that stands for the GPU's memory; empty means that nobody counts it. See NvidiaSMI.
	GPU string
	// Reexec is the command line of this program up to its part, such as [tuner sim]: what follows is the part, engine or
	// child, with its args. The program is this one itself (/proc/self/exe), whatever the first word.
	Reexec []string

	Out io.Writer // vLLM's log
	Err io.Writer // what Python writes to its standard error; nil means Out
}

// Serve is a healthy server that writes everything to log.
func (p *Profile) Serve(ctx context.Context, args []string, log io.Writer) error {
	return (&Server{Profile: p, Out: log}).Serve(ctx, args)
}

// Serve reads vLLM's args, writes its start-up lines, takes the profile's time to start, and answers HTTP until ctx ends, a
// fault ends it, or its engine dies. It returns nil where vLLM exits with 0, which is also after the death of its engine;
// ExitCode gives the code for an error. What vLLM would say of the error has been said. A *FaultError is of ours.
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
	return newLogger(s.Out, s.Err)
}

// check refuses what needs a setting that is not there.
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
		return &FaultError{"the engine's own process needs Server.Reexec, to be started"}
	}
	return nil
}

// serve goes through the server's life.
func (s *Server) serve(ctx context.Context, args []string, began time.Time, log *logger) error {
	options, err := s.Profile.ParseArgs(args)
	if err != nil {
		return err
	}
	log.api("api_server.py:1272", "vLLM API server version %s", Version)
	log.api("utils.py:263", "non-default args: {'args': %q}", args)
	if err := s.strike(ctx, atBegin, options, log); err != nil {
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
	log.api("api_server.py:1346", "Starting vLLM API server 0 on http://%s",
		net.JoinHostPort(options.Host, strconv.Itoa(options.Port)))
	if err := s.strike(ctx, beforeListening, options, log); err != nil {
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
	engine, err := NewEngine(s.Profile, options)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	return s.serveHTTP(ctx, newGate(s, core, newLive(engine), log, began), listener)
}

// startUp is the start of an engine. It returns the GPU's memory that it holds.
func (s *Server) startUp(ctx context.Context, o Options, log *logger) (*memory, error) {
	log.engine("core.py:97", "Initializing a V1 LLM engine (v%s) with config: model='%s', simulated profile %s",
		Version, o.Model, s.Profile.Name)
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

// loadWeights takes the time of the phases up to the profile run and writes their lines.
func (s *Server) loadWeights(ctx context.Context, o Options, m *memory, log *logger) error {
	p, t := s.Profile, s.Profile.StartUp
	log.engine("gpu_model_runner.py:3808", "Starting to load model %s...", o.Model)
	if err := s.strike(ctx, whileLoading, o, log); err != nil {
		return err
	}
	if err := errors.Join(m.hold(p.Memory.FixedGiB*1024), wait(ctx, t.Weights)); err != nil {
		return err
	}
	log.engine("default_loader.py:308", "Loading weights took %.2f seconds", t.Weights)
	log.engine("gpu_model_runner.py:3905", "Model loading took %.2f GiB memory and %.6f seconds", p.Memory.FixedGiB, t.Weights)
	if err := wait(ctx, t.Compile+t.Profile); err != nil {
		return err
	}
	log.engine("monitor.py:34", "torch.compile takes %.2f s in total", t.Compile)
	return errors.Join(s.strike(ctx, whileProfiling, o, log), m.disturbed())
}

// sizeCache is the rest of a start: the KV cache and the graphs. Like vLLM it comes after the weights, so a cache that is too
// small is found late.
func (s *Server) sizeCache(ctx context.Context, o Options, m *memory, log *logger) error {
	p, t := s.Profile, s.Profile.StartUp
	log.engine("gpu_worker.py:358", "Available KV cache memory: %.2f GiB", p.KVGiB(o))
	tokens, err := p.KVTokens(o)
	if err != nil {
		return err
	}
	log.engine("kv_cache_utils.py:1305", "GPU KV cache size: %s tokens", thousands(tokens))
	log.engine("kv_cache_utils.py:1310", "Maximum concurrency for %s tokens per request: %.2fx",
		thousands(o.MaxModelLen), float64(tokens)/float64(o.MaxModelLen))
	if err := errors.Join(m.hold(o.GPUMemoryUtilization*p.Memory.GPUGiB*1024), wait(ctx, t.Graphs)); err != nil {
		return err
	}
	log.engine("gpu_model_runner.py:4856", "Graph capturing finished in %.0f secs, took %.2f GiB", t.Graphs, p.Memory.GraphReserveGiB)
	log.engine("core.py:273", "init engine (profile, create kv cache, warmup model) took %.2f seconds", t.Profile+t.Compile+t.Graphs)
	return nil
}

// serveHTTP answers until the server's end.
func (s *Server) serveHTTP(ctx context.Context, g *gate, listener net.Listener) error {
	engineCtx, stopEngine := context.WithCancel(context.WithoutCancel(ctx))
	engineGone := make(chan struct{})
	go func() {
		defer close(engineGone)
		g.live.run(engineCtx)
	}()
	defer func() {
		stopEngine()
		<-engineGone
	}()
	handlersCtx, dropHandlers := context.WithCancel(context.WithoutCancel(ctx))
	defer dropHandlers()
	server := &http.Server{
		Handler:           g,
		ReadHeaderTimeout: time.Minute,
		BaseContext:       func(net.Listener) context.Context { return handlersCtx },
	}
	g.log.plain("INFO:     Application startup complete.")
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }() // ends when the server is closed below
	g.open()
	defer g.close()
	select {
	case err := <-served:
		return err
	case <-g.ended: // nothing is left to be said, or its engine is dead and the streams have been told
	case <-ctx.Done():
		g.log.api("launcher.py:110", "Shutting down FastAPI HTTP server.")
		s.lingerAtStop()
		stopEngine()
		g.close() // first: an engine that is stopped is none that has died
		g.core.stop()
	}
	g.log.plain("INFO:     Shutting down")
	s.shutdown(context.WithoutCancel(ctx), server, dropHandlers, g)
	<-served
	return nil
}

// lingerAtStop is the fault slow-stop.
func (s *Server) lingerAtStop() {
	if slow, ok := s.Faults.find("slow-stop"); ok {
		time.Sleep(slow.For)
	}
}

// shutdown lets the handlers end within stopGrace. With the fault hang-on-connections it waits for the clients instead, as
// uvicorn does, for which vLLM 0.14.1 sets no limit (vllm/entrypoints/launcher.py): the engine has gone, so no stream ends.
// With eight streams in flight two of three real servers were seen to wait so for more than 85 s.
func (s *Server) shutdown(ctx context.Context, server *http.Server, dropHandlers func(), g *gate) {
	if g.abrupt { // handlers that return by themselves would end their answers in good order
		_ = server.Close() // a listener that fails to close is closed all the same
		return
	}
	if _, ok := s.Faults.find("hang-on-connections"); ok {
		g.log.plain("INFO:     Waiting for connections to close. (CTRL+C to force quit)")
		_ = server.Shutdown(ctx) // without a limit there is none to be exceeded
		return
	}
	dropHandlers()
	ctx, cancel := context.WithTimeout(ctx, stopGrace)
	defer cancel()
	if server.Shutdown(ctx) != nil {
		_ = server.Close() // as above
	}
}

// ExitCode returns the code with which vLLM exits for an error of Serve: 2 for its command line, else 1.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	if _, ok := errors.AsType[*UsageError](err); ok {
		return 2
	}
	return 1
}

// refusal writes what vLLM says of the error with which it ends: argparse, pydantic, or Python itself.
func (l *logger) refusal(err error) {
	usage, isUsage := errors.AsType[*UsageError](err)
	config, isConfig := errors.AsType[*ConfigError](err)
	core, isCore := errors.AsType[*coreError](err)
	start, isStart := errors.AsType[*StartError](err)
	switch {
	case err == nil:
	case isUsage:
		l.write(l.errors, "", "usage: vllm serve [model_tag] [options]\n"+usage.Error())
	case isConfig:
		l.apiFailed(invalid(config.Text))
	case isCore:
		l.apiFailed(initFailed(core.exit))
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
	case <-time.After(seconds(s)):
		return nil
	}
}

// thousands writes a number as Python's {:,} does.
func thousands(n int) string {
	text := strconv.Itoa(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
