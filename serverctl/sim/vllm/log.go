package vllm

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"vllmtuner/serverctl/sim"
)

// The two processes of the log. The second one's name depends on the version: EngineCore_DP0 until 0.14.1, EngineCore later.
const (
	apiServer  = "APIServer"
	engineCore = "EngineCore"
)

// A logger writes what vLLM writes, as it does with NO_COLOR=1: the records of its logger to out, what Python itself says,
// tracebacks above all, to errors. Both begin with the process's name and number (vllm/utils/system_utils.py), each line of its
// own.
type logger struct {
	out, errors io.Writer
	release     *release
	apiPID      int
	enginePID   int // the same when the engine lives in the API server
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

// say writes a record: (Name pid=N) LEVEL MM-DD HH:MM:SS [file.py:LINE] message. One that the version does not have is not
// written.
func (l *logger) say(r logRecord, args ...any) {
	if r.format != "" {
		l.line(r.process, r.level, r.place, r.format, args...)
	}
}

// sayOf writes a record of which some versions have only the first of the values, or none.
func (l *logger) sayOf(r logRecord, args ...any) {
	verbs := strings.Count(r.format, "%") // no format has a sign of its own
	l.say(r, args[:min(verbs, len(args))]...)
}

func (l *logger) sayAll(list []logRecord) {
	for _, r := range list {
		l.say(r)
	}
}

// introduce is the first that an API server says: its version, as a line, or since 0.32.0 as a logo unless
// VLLM_DISABLE_LOG_LOGO=1 (log_version_and_model in vllm/entrypoints/serve/utils/api_utils.py).
func (l *logger) introduce(o sim.Options) {
	if l.release.log.logo == "" || os.Getenv("VLLM_DISABLE_LOG_LOGO") == "1" {
		l.sayOf(l.release.log.serving, l.release.version, o.Source())
		return
	}
	l.api(l.release.log.logo, "\n       █     █     █▄   ▄█\n ▄▄ ▄█ █     █     █ ▀▄▀ █  version %s\n"+
		"  █▄█▀ █     █     █     █  model   %s\n   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀\n", l.release.version, o.Source())
}

// started is what vLLM and uvicorn say when all is ready: the routes, but for HEAD as FastAPI's own pages, and that they listen.
func (l *logger) started(routes []route) {
	l.say(l.release.log.routes)
	for _, r := range routes {
		l.say(l.release.log.route, r.path, r.method)
	}
	l.uvicorn("Started server process [%d]", l.apiPID)
	l.uvicorn("Waiting for application startup.")
	l.uvicorn("Application startup complete.")
}

func (l *logger) line(process, level, place, format string, args ...any) {
	head := fmt.Sprintf("%s%s %s [%s] ", l.prefix(process), level, time.Now().Format("01-02 15:04:05"), place)
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

func (l *logger) api(place, format string, args ...any) {
	l.line(apiServer, "INFO", place, format, args...)
}

func (l *logger) apiError(place, format string, args ...any) {
	l.line(apiServer, "ERROR", place, format, args...)
}

func (l *logger) engineError(place, format string, args ...any) {
	l.line(engineCore, "ERROR", place, format, args...)
}

// trace writes what a process says outside its logger.
func (l *logger) trace(process, text string) { l.write(l.errors, l.prefix(process), text) }

// uvicorn writes one line of uvicorn's.
func (l *logger) uvicorn(format string, args ...any) {
	head := "INFO:     "
	if l.release.log.uvicorn {
		head = l.prefix(apiServer) + head
	}
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

// write writes lines at once, each behind the head. A log that cannot be written must not end the server, and there is nobody
// to tell.
func (l *logger) write(w io.Writer, head, text string) {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(head + line + "\n")
	}
	_, _ = io.WriteString(w, b.String())
}
