package vllmsim

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// The names of the two processes in the log (vLLM 0.14.1; 0.33 calls the second one EngineCore).
const (
	apiServer  = "APIServer"
	engineCore = "EngineCore_DP0"
)

// A logger writes what vLLM 0.14.1 writes: the records of its logger to out, what Python itself says, tracebacks above all,
// to errors. Both begin with the process's name and number (vllm/utils/system_utils.py), each line of its own.
type logger struct {
	out, errors io.Writer
	apiPID      int
	enginePID   int // the same when the engine lives in the API server
}

func newLogger(out, errors io.Writer) *logger {
	return &logger{out: out, errors: errors, apiPID: os.Getpid(), enginePID: os.Getpid()}
}

func (l *logger) prefix(process string) string {
	pid := l.apiPID
	if process == engineCore {
		pid = l.enginePID
	}
	return fmt.Sprintf("(%s pid=%d) ", process, pid)
}

// line writes a record: (Name pid=N) LEVEL MM-DD HH:MM:SS [file.py:LINE] message.
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

func (l *logger) engine(place, format string, args ...any) {
	l.line(engineCore, "INFO", place, format, args...)
}

func (l *logger) engineError(place, format string, args ...any) {
	l.line(engineCore, "ERROR", place, format, args...)
}

// trace writes what a process says outside its logger.
func (l *logger) trace(process, text string) { l.write(l.errors, l.prefix(process), text) }

// plain writes one line of uvicorn's.
func (l *logger) plain(line string) { l.write(l.out, "", line) }

// write writes lines at once, each behind the head. A log that cannot be written must not end the server, and there is nobody
// to tell.
func (l *logger) write(w io.Writer, head, text string) {
	var b strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		b.WriteString(head + line + "\n")
	}
	_, _ = io.WriteString(w, b.String())
}
