package serverctl

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	tailLines  = 50
	maxLine    = 64 << 10 // a longer line is cut: some libraries print whole configurations
	maxErrLine = 1000     // bytes of a line that an error or the tail keeps
)

// staleSign is how long after a sign under load the server may die of it. What the server survives for longer was not
// fatal.
const staleSign = 30 * time.Second

// A logbook reads a server's log line by line. It keeps the facts, the first sign of each kind of death and the last
// lines, and passes all lines on without secrets. It is an io.Writer that never fails.
type logbook struct {
	to      io.Writer // gets the full log; may be nil
	secrets secrets   // to hide; may be empty

	mu       sync.Mutex
	writeErr error // the first error of to
	partial  []byte
	logState
}

// A logState is what a log has told so far.
type logState struct {
	tail       []string // the last lines
	facts      Facts
	phase      string            // empty until the log names one
	began      time.Time         // beginning of the phase; zero before begin
	shards     int               // percent of the weights' files loaded so far
	args       map[string]string // the flags that the server found on its command line
	parts      []Part            // the completed phases
	loaded     bool              // the server was ready: from now on it dies under load
	resetsDone int               // successful resets of the prefix cache
	resetsLost int               // failed ones
	signs      signs
}

// signs are the first lines of the current stage (start or load) that indicate a death.
type signs struct {
	known     *ExitError // a line that matched a death
	at        time.Time  // when known was set
	outside   *ExitError // somebody ended the server before anything failed
	asked     string     // the line by which the API server, or somebody outside, asked the engine to end
	exception string     // an unknown exception
	ofEngine  bool       // the exception comes from the engine or a worker
	code      string     // the last line of code in a traceback
	wrapper   string     // a line that says something failed, but not what
	usage     string     // an error of argparse
	last      string     // the last line with content of its own
}

// Write accepts output in pieces of any size.
func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(b)
	for {
		line, rest, whole := bytes.Cut(b, []byte{'\n'})
		if room := maxLine - len(l.partial); room > 0 {
			l.partial = append(l.partial, line[:min(room, len(line))]...)
		}
		if !whole {
			break
		}
		l.endLine()
		b = rest
	}
	// A progress bar redraws itself after each carriage return; only the last state matters.
	if i := bytes.LastIndexByte(l.partial, '\r'); i > 0 && i < len(l.partial)-1 {
		l.partial = append(l.partial[:0], l.partial[i:]...)
	}
	if !l.loaded {
		l.seeShards(l.partial)
	}
	return n, nil
}

// seeShards records how much of the weights is loaded.
func (l *logbook) seeShards(line []byte) {
	if g := shardsLoaded.FindSubmatch(line); g != nil {
		l.shards = int(parseFigure(string(g[1])))
	}
}

// close handles a last line without a line break, and returns the first error of the full log.
func (l *logbook) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.partial) > 0 {
		l.endLine()
	}
	if l.writeErr != nil {
		return fmt.Errorf("write the server's log: %w", l.writeErr)
	}
	return nil
}

// endLine handles the line in partial.
func (l *logbook) endLine() {
	line := strings.TrimRight(string(l.partial), "\r")
	l.partial = l.partial[:0]
	if len(line) == maxLine { // it may have been cut inside a secret
		line = line[:len(line)-l.secrets.longest]
	}
	line = colours.ReplaceAllString(line[strings.LastIndexByte(line, '\r')+1:], "")
	line = l.secrets.hide(line)
	if l.to != nil && l.writeErr == nil {
		_, l.writeErr = io.WriteString(l.to, line+"\n")
	}
	if strings.TrimSpace(line) == "" || accessLine.MatchString(line) {
		return
	}
	if len(l.tail) == tailLines {
		l.tail = slices.Delete(l.tail, 0, 1)
	}
	l.tail = append(l.tail, shorten(line))
	l.learn(line)
}

// learn extracts everything that a line tells.
func (l *logbook) learn(line string) {
	if !l.loaded {
		l.seeShards([]byte(line))
	}
	text := processPrefix.ReplaceAllString(line, "")
	level := levelPrefix.FindStringSubmatch(text)
	if level == nil {
		level = dynamoPrefix.FindStringSubmatch(text)
	}
	if level != nil {
		text = text[len(level[0]):]
	}
	l.signs.learnOutside(text, l.loaded)
	if level == nil || level[1] == "ERROR" || level[1] == "CRITICAL" {
		l.signs.learn(text, ofEngine.MatchString(line), l.loaded)
		return
	}
	switch {
	case strings.Contains(text, resetDone):
		l.resetsDone++
	case strings.Contains(text, resetFailed):
		l.resetsLost++
	}
	if l.loaded {
		return
	}
	if _, dict, ok := strings.Cut(text, "non-default args: "); ok { // vllm/entrypoints/utils.py
		l.args = parseNonDefault(dict)
	}
	for _, f := range facts {
		if g := f.text.FindStringSubmatch(text); g != nil {
			f.read(&l.facts, g)
		}
	}
	for _, p := range phases {
		if p.text.MatchString(text) {
			l.enter(p.name, time.Now())
		}
	}
}

// begin sets the time of the server's start, from which its phases count.
func (l *logbook) begin(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = now
}

// enter ends the current phase and begins another.
func (l *logbook) enter(phase string, now time.Time) {
	if phase == l.phase {
		return
	}
	l.parts = addPart(l.parts, cmp.Or(l.phase, firstPhase), now.Sub(l.began))
	l.phase, l.began = phase, now
}

// addPart adds to the part with the same name: a phase can come twice, such as profiling before and after a
// compilation.
func addPart(parts []Part, name string, took time.Duration) []Part {
	if i := slices.IndexFunc(parts, func(p Part) bool { return p.Name == name }); i >= 0 {
		parts[i].Took += took
		return parts
	}
	return append(parts, Part{Name: name, Took: took})
}

// learn keeps the first line of each kind. An exception of the engine replaces one of the API server, which only
// repeats it.
func (s *signs) learn(text string, ofEngine, loaded bool) {
	if survived.MatchString(text) {
		return
	}
	if frame.MatchString(text) { // a line of code says nothing about the failure
		if !marks.MatchString(text) {
			s.code = shorten(text)
		}
		return
	}
	if e := recognise(text, loaded); e != nil && (s.known == nil || s.yields(e, loaded)) {
		if pydanticField.MatchString(e.Evidence) { // the line before names the field
			e.Evidence = s.last + ": " + e.Evidence
		}
		s.known, s.at = e, time.Now()
	}
	if !pointer.MatchString(text) && !wrapper.MatchString(text) {
		s.last = shorten(text)
	}
	if g := usageError.FindStringSubmatch(text); g != nil {
		s.usage = shorten(g[1])
	}
	switch {
	case wrapper.MatchString(text):
		if s.wrapper == "" {
			s.wrapper = shorten(text)
			if loaded && !s.ofEngine {
				s.exception = "" // it came from a failed request, which the server survived
			}
		}
	case exception.MatchString(text) && !pointer.MatchString(text):
		if s.exception == "" || ofEngine && !s.ofEngine {
			s.exception, s.ofEngine = shorten(text), ofEngine
			if !strings.Contains(text, ": ") && s.code != "" { // a bare AssertionError says nothing
				s.exception += ", at: " + s.code
			}
		}
	}
}

// yields reports whether a later death replaces the known one. An old sign, or a fault of the machine, must not hide
// the real cause. NCCL's error may follow from a lack of memory. A rank that does not answer may wait for one that
// NCCL lost.
func (s *signs) yields(to *ExitError, loaded bool) bool {
	switch {
	case s.known.Cause == NCCL:
		return to.Cause != NCCL
	case s.known.Class == Hang:
		return to.Cause == NCCL
	case !loaded && s.known.Fatal(): // a server that counts memory has found the model and its files
		return to.Class == OOMStart || to.Class == KVTooSmall
	}
	return loaded && (s.known.Class == Infrastructure || time.Since(s.at) > staleSign)
}

// recognise returns the death that a line shows, or nil.
func recognise(text string, loaded bool) *ExitError {
	for _, d := range deaths {
		g := d.text.FindStringSubmatch(text)
		if g == nil {
			continue
		}
		class := d.start
		if loaded {
			class = d.load
		}
		if class == "" {
			continue
		}
		e := &ExitError{Class: class, Cause: d.cause, Evidence: shorten(g[min(1, len(g)-1)])}
		if d.refine != nil {
			d.refine(e, g)
		}
		return e
	}
	return nil
}

func shorten(line string) string {
	line = strings.TrimSpace(line)
	if len(line) > maxErrLine {
		line = strings.ToValidUTF8(line[:maxErrLine], "") + " …"
	}
	return line
}

// ready ends the start and returns its parts. A later death counts as one under load.
func (l *logbook) ready(now time.Time) []Part {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.parts = addPart(l.parts, cmp.Or(l.phase, firstPhase), now.Sub(l.began))
	l.loaded, l.signs = true, signs{}
	return l.parts
}

// now returns a copy of what the log has told so far.
func (l *logbook) now() logState {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.logState
	now.tail, now.args = slices.Clone(l.tail), maps.Clone(l.args)
	return now
}

// progress returns the phase for people, with the part of the weights that is loaded.
func (l *logState) progress() string {
	if l.phase == loadingPhase && l.shards > 0 {
		return fmt.Sprintf("%s, %d %%", l.phase, l.shards)
	}
	return l.phase
}

// death explains the end of a server by its log. It takes the first of these that exists: the first known death; an
// end from outside; the first exception, preferably the engine's; a line that says something failed; how the process
// ended. code is the exit code, -1 when there is none. ending describes how the process ended.
func (l *logbook) death(end ending) *ExitError {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.signs
	e := &ExitError{Class: StartCrash, Evidence: end.words}
	if l.loaded {
		e.Class = CrashLoad
		if end.code == 0 && !s.ofEngine { // no flag ends a server with exit end.code 0
			e.Class, e.Cause = Infrastructure, ExitZero
		}
	}
	bySignal := endedBy(end.status(), l.loaded, end.words)
	switch {
	case s.known != nil && !(l.loaded && time.Since(s.at) > staleSign):
		*e = *s.known
	case s.outside != nil:
		*e = *s.outside
	case s.asked != "" && s.exception == "":
		e.Class, e.Cause, e.Evidence = Infrastructure, Terminated, s.asked
	case bySignal != nil && s.wrapper == "":
		*e = *bySignal
	case s.wrapper != "" && l.loaded:
		e.Class, e.Cause, e.Evidence = CrashLoad, EngineDead, cmp.Or(s.exception, s.telling(s.wrapper), end.words)
	case s.exception != "" && (!l.loaded || s.ofEngine || end.code > 0):
		e.Evidence = s.exception
	case s.wrapper != "":
		e.Evidence = cmp.Or(s.telling(s.wrapper), end.words)
	case (end.code == 126 || end.code == 127) && !l.loaded: // a shell's codes for a program that it cannot run
		e.Class, e.Cause, e.Evidence = Infrastructure, Command, cmp.Or(l.lastLine(), end.words)
	case end.code == 2 && !l.loaded && s.usage != "":
		e.Class, e.Evidence = FlagsRejected, s.usage
	case !l.loaded && end.code > 0:
		e.Evidence = cmp.Or(l.lastLine(), end.words)
	}
	e.Code, e.Tail = end.code, slices.Clone(l.tail)
	return e
}

// An ending says how a server's first process ended.
type ending struct {
	code   int            // exit code; -1 when it still runs, and when a signal ended it
	signal syscall.Signal // 0 when none ended it
	words  string         // for people; empty when it still runs
}

// status returns the exit code, or minus the signal that ended the process.
func (e ending) status() int {
	if e.signal != 0 {
		return -int(e.signal)
	}
	return max(e.code, 0)
}

// telling returns the line, or the last line with content if this one only refers to others.
func (s *signs) telling(line string) string {
	if pointer.MatchString(line) {
		return s.last
	}
	return line
}

// lastLine returns the last line; empty when there is none.
func (l *logState) lastLine() string {
	if len(l.tail) == 0 {
		return ""
	}
	return l.tail[len(l.tail)-1]
}
