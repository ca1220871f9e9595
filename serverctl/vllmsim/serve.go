package vllmsim

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// Version is the vLLM whose face the HTTP server has.
const Version = "0.14.1"

// stopGrace is how long a stopping server waits for its handlers.
const stopGrace = 5 * time.Second

// Serve is `vllm serve` on a simulated GPU: it reads the args, writes vLLM's start-up lines to log, takes the profile's time
// to start, and answers HTTP until ctx ends. A refusal to start is a *UsageError, a *ConfigError or a *StartError; ExitCode
// gives the code that vLLM would exit with.
func (p *Profile) Serve(ctx context.Context, args []string, log io.Writer) error {
	options, err := p.ParseArgs(args)
	if err != nil {
		return err
	}
	l := &logger{w: log, pid: os.Getpid()}
	l.api("api_server.py:1272", "vLLM API server version %s", Version)
	l.api("utils.py:263", "non-default args: {'args': %q}", args)
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(options.Host, strconv.Itoa(options.Port)))
	if err != nil {
		return fmt.Errorf("OSError: [Errno 98] Address already in use: %w", err)
	}
	defer listener.Close() // vLLM binds before it loads; nothing is accepted until Serve
	engine, err := p.startUp(ctx, options, l)
	if err != nil {
		return err
	}
	return serveHTTP(ctx, engine, listener, l)
}

// startUp takes the time of the phases and writes their lines. Like vLLM it sizes the KV cache after the weights are loaded,
// so a cache that is too small is found late.
func (p *Profile) startUp(ctx context.Context, o Options, l *logger) (*Engine, error) {
	s := p.StartUp
	l.engine("core.py:97", "Initializing a V1 LLM engine (v%s) with config: model='%s', simulated profile %s", Version, o.Model, p.Name)
	l.engine("gpu_model_runner.py:3808", "Starting to load model %s...", o.Model)
	if err := wait(ctx, s.Weights); err != nil {
		return nil, err
	}
	l.engine("default_loader.py:308", "Loading weights took %.2f seconds", s.Weights)
	l.engine("gpu_model_runner.py:3905", "Model loading took %.2f GiB memory and %.6f seconds", p.Memory.FixedGiB, s.Weights)
	if err := wait(ctx, s.Compile+s.Profile); err != nil {
		return nil, err
	}
	l.engine("monitor.py:34", "torch.compile takes %.2f s in total", s.Compile)
	l.engine("gpu_worker.py:358", "Available KV cache memory: %.2f GiB", p.KVGiB(o))
	engine, err := NewEngine(p, o)
	if err != nil {
		l.engineError("core.py:936", "EngineCore failed to start.")
		return nil, err
	}
	l.engine("kv_cache_utils.py:1305", "GPU KV cache size: %s tokens", thousands(engine.KVTokens()))
	l.engine("kv_cache_utils.py:1310", "Maximum concurrency for %s tokens per request: %.2fx",
		thousands(o.MaxModelLen), float64(engine.KVTokens())/float64(o.MaxModelLen))
	if err := wait(ctx, s.Graphs); err != nil {
		return nil, err
	}
	l.engine("gpu_model_runner.py:4856", "Graph capturing finished in %.0f secs, took %.2f GiB", s.Graphs, p.Memory.GraphReserveGiB)
	l.engine("core.py:273", "init engine (profile, create kv cache, warmup model) took %.2f seconds", s.Profile+s.Compile+s.Graphs)
	return engine, nil
}

// serveHTTP answers until ctx ends.
func serveHTTP(ctx context.Context, engine *Engine, listener net.Listener, l *logger) error {
	engineCtx, stopEngine := context.WithCancel(context.WithoutCancel(ctx))
	defer stopEngine()
	live := newLive(engine)
	engineGone := make(chan struct{})
	go func() {
		defer close(engineGone)
		live.run(engineCtx)
	}()
	server := &http.Server{
		Handler:           newAPI(live, l),
		ReadHeaderTimeout: time.Minute,
		BaseContext:       func(net.Listener) context.Context { return engineCtx },
	}
	l.api("api_server.py:1346", "Starting vLLM API server 0 on http://%s", listener.Addr())
	l.plain("INFO:     Application startup complete.")
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	var err error
	select {
	case err = <-served:
	case <-ctx.Done():
		l.api("launcher.py:110", "Shutting down FastAPI HTTP server.")
		stopEngine()
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
		if err := server.Shutdown(grace); err != nil {
			server.Close()
		}
		err = <-served
	}
	stopEngine()
	<-engineGone
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
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

func wait(ctx context.Context, s float64) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(seconds(s)):
		return nil
	}
}

// A logger writes lines as vLLM 0.14.1 does: (Name pid=N) LEVEL MM-DD HH:MM:SS [file.py:LINE] message.
type logger struct {
	w   io.Writer
	pid int
}

func (l *logger) line(process, level, place, format string, args ...any) {
	l.plain(fmt.Sprintf("(%s pid=%d) %s %s [%s] %s", process, l.pid, level, time.Now().Format("01-02 15:04:05"), place, fmt.Sprintf(format, args...)))
}

func (l *logger) api(place, format string, args ...any) {
	l.line("APIServer", "INFO", place, format, args...)
}

func (l *logger) engine(place, format string, args ...any) {
	l.line("EngineCore_DP0", "INFO", place, format, args...)
}

func (l *logger) engineError(place, format string, args ...any) {
	l.line("EngineCore_DP0", "ERROR", place, format, args...)
}

// plain writes one line. A log that cannot be written must not end the server, and there is nobody to tell.
func (l *logger) plain(line string) { _, _ = io.WriteString(l.w, line+"\n") }

// thousands writes a number as Python's {:,} does.
func thousands(n int) string {
	text := strconv.Itoa(n)
	var b strings.Builder
	for i, c := range text {
		if i > 0 && (len(text)-i)%3 == 0 {
			b.WriteByte(',')
		}
		b.WriteRune(c)
	}
	return b.String()
}
