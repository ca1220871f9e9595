package vllm

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// These are the two processes that write to the log. In the log the engine core has the name release.engine.
const (
	apiServer  = "APIServer"
	engineCore = "EngineCore"
)

// A logger writes vLLM's log without colours, as vLLM does with NO_COLOR=1. Records go to the field out. Tracebacks and
// other output of Python itself go to the field errors. Each line begins with the process's name and PID
// (vllm/utils/system_utils.py).
type logger struct {
	out, errors io.Writer
	release     *release
	apiPID      int
	enginePID   int // the API server's PID if the engine runs in the API server
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

// introduce logs the version, as an API server does first. For 0.32.0 and later, introduce logs what vLLM logs with
// VLLM_DISABLE_LOG_LOGO=1 (log_version_and_model in vllm/entrypoints/serve/utils/api_utils.py).
func (l *logger) introduce(o sim.Options) {
	if l.release.since032 {
		l.api("vLLM server version %s, serving model %s", l.release.version, o.Source())
		return
	}
	l.api("vLLM API server version %s", l.release.version)
}

// engineReady writes what the API server logs when its engine has started, but its HTTP server has not.
func (l *logger) engineReady(address string) {
	server := "vLLM API server 0"
	if l.release.since032 {
		server = "vLLM server"
	}
	l.api("Starting %s on http://%s", server, address)
}

// stopping writes what the API server logs before it ends its engine.
func (l *logger) stopping() {
	if l.release.since032 {
		l.api("[shutdown] API server: shutdown triggered")
		return
	}
	l.api("Shutting down FastAPI HTTP server.")
}

// record writes one record. vLLM's records name a source file and a line in brackets. No program reads these two, so
// each record here has [simulated:1].
func (l *logger) record(process, level, format string, args ...any) {
	head := fmt.Sprintf("%s%s %s [simulated:1] ", l.prefix(process), level, time.Now().Format("01-02 15:04:05"))
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

func (l *logger) api(format string, args ...any) { l.record(apiServer, "INFO", format, args...) }

func (l *logger) apiError(format string, args ...any) { l.record(apiServer, "ERROR", format, args...) }

func (l *logger) engine(format string, args ...any) { l.record(engineCore, "INFO", format, args...) }

func (l *logger) engineError(format string, args ...any) {
	l.record(engineCore, "ERROR", format, args...)
}

// trace writes output that a process does not send through its logger.
func (l *logger) trace(process, text string) { l.write(l.errors, l.prefix(process), text) }

// uvicorn writes one line of the log of uvicorn, vLLM's HTTP server.
func (l *logger) uvicorn(format string, args ...any) {
	head := "INFO:     "
	if !l.release.since032 {
		head = l.prefix(apiServer) + head
	}
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

// write writes all lines of a text in one call, and puts head before each line. It ignores errors, because a server
// must not end when its log cannot be written.
func (l *logger) write(w io.Writer, head, text string) {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(head + line + "\n")
	}
	_, _ = io.WriteString(w, b.String())
}
