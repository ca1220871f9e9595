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

// A logger writes vLLM's log, as with NO_COLOR=1. Records go to out; tracebacks and other output of Python itself go to errors. Each
// line begins with the process's name and PID (vllm/utils/system_utils.py).
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

// say writes a record: (Name pid=N) LEVEL MM-DD HH:MM:SS [file.py:LINE] message. It skips records that the version does not have.
func (l *logger) say(r logRecord, args ...any) {
	if r.format != "" {
		l.line(r.process, r.level, r.source, r.format, args...)
	}
}

// sayPart writes a record with as many of the values as the version's format takes.
func (l *logger) sayPart(r logRecord, args ...any) {
	verbs := strings.Count(r.format, "%") // no format has a literal percent sign
	l.say(r, args[:min(verbs, len(args))]...)
}

func (l *logger) sayAll(list []logRecord) {
	for _, r := range list {
		l.say(r)
	}
}

// introduce writes the first record of an API server: its version, as a line, or since 0.32.0 as a logo unless
// VLLM_DISABLE_LOG_LOGO=1 (log_version_and_model in vllm/entrypoints/serve/utils/api_utils.py).
func (l *logger) introduce(o sim.Options) {
	if l.release.log.logo == "" || os.Getenv("VLLM_DISABLE_LOG_LOGO") == "1" {
		l.sayPart(l.release.log.serving, l.release.version, o.Source())
		return
	}
	l.api(l.release.log.logo, "\n       █     █     █▄   ▄█\n ▄▄ ▄█ █     █     █ ▀▄▀ █  version %s\n"+
		"  █▄█▀ █     █     █     █  model   %s\n   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀\n", l.release.version, o.Source())
}

// started writes what vLLM and uvicorn log when the server is ready, with its routes.
func (l *logger) started(routes []route) {
	l.say(l.release.log.routes)
	for _, r := range routes {
		l.say(l.release.log.route, r.path, r.method)
	}
	l.uvicorn("Started server process [%d]", l.apiPID)
	l.uvicorn("Waiting for application startup.")
	l.uvicorn("Application startup complete.")
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

func (l *logger) engineError(source, format string, args ...any) {
	l.line(engineCore, "ERROR", source, format, args...)
}

// trace writes output of a process that does not go through its logger.
func (l *logger) trace(process, text string) { l.write(l.errors, l.prefix(process), text) }

// uvicorn writes one line of uvicorn.
func (l *logger) uvicorn(format string, args ...any) {
	head := "INFO:     "
	if l.release.log.uvicorn {
		head = l.prefix(apiServer) + head
	}
	l.write(l.out, head, fmt.Sprintf(format, args...))
}

// write writes all lines in one call, each with the head before it. It ignores errors, because a server must not end when its log
// cannot be written.
func (l *logger) write(w io.Writer, head, text string) {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(head + line + "\n")
	}
	_, _ = io.WriteString(w, b.String())
}
