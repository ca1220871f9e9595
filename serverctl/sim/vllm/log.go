package vllm

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// The two processes of the log. The log calls the second one release.engine.
const (
	apiServer  = "APIServer"
	engineCore = "EngineCore"
)

// A logger writes vLLM's log, as with NO_COLOR=1. Records go to out; tracebacks and other output of Python itself go to
// errors. Each line begins with the process's name and PID (vllm/utils/system_utils.py).
type logger struct {
	out, errors io.Writer
	release     *release
	apiPID      int
	enginePID   int // the PID of the API server when the engine runs in it
}

func newLogger(out, errors io.Writer, f *release) *logger {
	return &logger{out: out, errors: errors, release: f, apiPID: os.Getpid(), enginePID: os.Getpid()}
}

func (l *logger) prefix(process string) string {
	if process == engineCore {
		return fmt.Sprintf("(%s pid=%d) ", l.release.engine, l.enginePID)
	}
	return fmt.Sprintf("(%s pid=%d) ", process, l.apiPID)
}

// introduce writes the first record of an API server: its version, as a line, or since 0.32.0 as a logo unless
// VLLM_DISABLE_LOG_LOGO=1 (log_version_and_model in vllm/entrypoints/serve/utils/api_utils.py).
func (l *logger) introduce(o sim.Options) {
	const source = "api_server.py:1272"
	version := l.release.version
	switch {
	case !l.release.since032:
		l.api(source, "vLLM API server version %s", version)
	case os.Getenv("VLLM_DISABLE_LOG_LOGO") == "1":
		l.api(source, "vLLM server version %s, serving model %s", version, o.Source())
	default:
		l.api(source, "\n       █     █     █▄   ▄█\n ▄▄ ▄█ █     █     █ ▀▄▀ █  version %s\n"+
			"  █▄█▀ █     █     █     █  model   %s\n   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀\n", version, o.Source())
	}
}

// engineReady writes what the API server logs when its engine has started and its HTTP server has not.
func (l *logger) engineReady(address string) {
	warn := func() {
		if devMode() {
			l.line(apiServer, "WARNING", "__init__.py:14", "SECURITY WARNING: Development endpoints are enabled! "+
				"This should NOT be used in production!")
		}
	}
	tasks := func() { l.api("api_server.py:1014", "Supported tasks: ['generate']") }
	if l.release.since032 {
		tasks()
		warn()
		l.api("api_server.py:1346", "Starting vLLM server on http://%s", address)
		return
	}
	warn()
	tasks()
	l.api("api_server.py:1346", "Starting vLLM API server 0 on http://%s", address)
}

// started writes what vLLM and uvicorn log when the server is ready, with its routes.
func (l *logger) started(routes []route) {
	l.api("launcher.py:38", "Available routes are:")
	for _, r := range routes {
		l.api("launcher.py:46", "Route: %s, Methods: %s", r.path, r.method)
	}
	l.uvicorn("Started server process [%d]", l.apiPID)
	l.uvicorn("Waiting for application startup.")
	l.uvicorn("Application startup complete.")
}

// stopping writes what the API server logs before it ends its engine.
func (l *logger) stopping() {
	if !l.release.since032 {
		l.api("launcher.py:110", "Shutting down FastAPI HTTP server.")
		return
	}
	l.shutdown("API server: shutdown triggered", "API server: stopping engine client mode=abort timeout=0s",
		"MPClient: start timeout=0s", "MPClient: stopping engine manager")
}

// stopped writes what the API server logs when its engine has ended.
func (l *logger) stopped() {
	if l.release.since032 {
		l.shutdown("MPClient: engine manager stopped", "MPClient: cleaning up background resources", "MPClient: complete",
			"API server: engine client stopped", "API server: signalling HTTP server shutdown",
			"API server: shutting down FastAPI HTTP server")
	}
}

func (l *logger) shutdown(texts ...string) {
	for _, text := range texts {
		l.api("launcher.py:110", "[shutdown] %s", text)
	}
}

func (l *logger) line(process, level, source, format string, args ...any) {
	head := fmt.Sprintf("%s%s %s [%s] ", l.prefix(process), level, time.Now().Format("01-02 15:04:05"), source)
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

func (l *logger) api(source, format string, args ...any) {
	l.line(apiServer, "INFO", source, format, args...)
}

func (l *logger) apiError(source, format string, args ...any) {
	l.line(apiServer, "ERROR", source, format, args...)
}

func (l *logger) engine(source, format string, args ...any) {
	l.line(engineCore, "INFO", source, format, args...)
}

func (l *logger) engineError(source, format string, args ...any) {
	l.line(engineCore, "ERROR", source, format, args...)
}

// trace writes output that a process does not send through its logger.
func (l *logger) trace(process, text string) { l.write(l.errors, l.prefix(process), text) }

// uvicorn writes one line of uvicorn.
func (l *logger) uvicorn(format string, args ...any) {
	head := "INFO:     "
	if !l.release.since032 {
		head = l.prefix(apiServer) + head
	}
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

// write writes all lines in one call, each with the head before it. It ignores errors, because a server must not end
// when its log cannot be written.
func (l *logger) write(w io.Writer, head, text string) {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(head + line + "\n")
	}
	_, _ = io.WriteString(w, b.String())
}
