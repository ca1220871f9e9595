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
	maxErrLine = 1000     // how many bytes of a line an error or the tail keeps
)

// staleSign is the age at which an error line no longer explains a death under load. By then the server has survived
// the error.
const staleSign = 30 * time.Second

// A logbook reads a server's log line by line. It keeps the facts, the last lines, and the first lines that may explain
// a death. It passes all lines on, without secrets. It is an io.Writer that never fails.
type logbook struct {
	fullLog io.Writer // gets the full log; may be nil
	censor  censor    // texts to hide in the log; may be empty

	mu       sync.Mutex
	writeErr error // the first error when writing to fullLog
	partial  []byte
	logState
}

// A logState is what the logbook has learned from the log so far.
type logState struct {
	tail       []string // the last lines
	facts      Facts
	phase      string            // current phase; empty until the log names one
	began      time.Time         // when the phase began; zero before begin was called
	shards     int               // how many percent of the weight files are loaded
	args       map[string]string // flags of the command line, as the server logged them
	parts      []Part            // the completed phases
	loaded     bool              // the server has been ready: a later death is a death under load
	resetsDone int               // successful resets of the prefix cache
	resetsLost int               // failed resets of the prefix cache
	signs      signs
}

// signs are the lines of the current stage (start or load) that may explain a death, mostly the first of each kind.
type signs struct {
	known     *ExitError // the failure that deathPatterns gives for a line
	at        time.Time  // when known was set
	outside   *ExitError // set if somebody ended the server before anything failed
	asked     string     // the line in which the API server, or somebody outside, asks the engine to end
	exception string     // the first exception, preferably of the engine
	ofEngine  bool       // whether the exception comes from the engine or a worker
	code      string     // the last line of code that a traceback shows
	wrapper   string     // a line that says only that something failed, but not what
	usage     string     // an error of argparse
	last      string     // the last line that says something itself, and does not only refer to other lines
}

// Write accepts output in pieces of any size, and never fails.
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
	// A progress bar redraws itself after each carriage return; only its last state matters.
	if i := bytes.LastIndexByte(l.partial, '\r'); i > 0 && i < len(l.partial)-1 {
		l.partial = append(l.partial[:0], l.partial[i:]...)
	}
	if !l.loaded {
		l.seeShards(l.partial)
	}
	return n, nil
}

// seeShards records which percentage of the weight files is loaded, if the line tells it.
func (l *logbook) seeShards(line []byte) {
	if g := shardsLoaded().FindSubmatch(line); g != nil {
		l.shards = int(parseFigure(string(g[1])))
	}
}

// close handles a last line without a line break. It returns the first error of writing the full log.
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

// endLine handles the complete line that l.partial holds, and empties l.partial.
func (l *logbook) endLine() {
	line := strings.TrimRight(string(l.partial), "\r")
	l.partial = l.partial[:0]
	if len(line) == maxLine { // the line may have been cut inside a secret
		line = line[:len(line)-l.censor.longest]
	}
	line = colours().ReplaceAllString(line[strings.LastIndexByte(line, '\r')+1:], "")
	line = l.censor.hide(line)
	if l.fullLog != nil && l.writeErr == nil {
		_, l.writeErr = io.WriteString(l.fullLog, line+"\n")
	}
	if strings.TrimSpace(line) == "" || accessLine().MatchString(line) {
		return
	}
	if len(l.tail) == tailLines {
		l.tail = slices.Delete(l.tail, 0, 1)
	}
	l.tail = append(l.tail, shorten(line))
	l.learn(line)
}

// learn extracts facts, phases and signs of a death from a line.
func (l *logbook) learn(line string) {
	if !l.loaded {
		l.seeShards([]byte(line))
	}
	text := processPrefix().ReplaceAllString(line, "")
	level := levelPrefix().FindStringSubmatch(text)
	if level == nil {
		level = dynamoPrefix().FindStringSubmatch(text)
	}
	if level != nil {
		text = text[len(level[0]):]
	}
	l.signs.learnOutside(text, l.loaded)
	if level == nil || level[1] == "ERROR" || level[1] == "CRITICAL" {
		l.signs.learn(text, ofEngine().MatchString(line), l.loaded)
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
	for _, f := range factPatterns {
		if g := f.text().FindStringSubmatch(text); g != nil {
			f.read(&l.facts, g)
		}
	}
	for _, p := range phasePatterns {
		if p.text().MatchString(text) {
			l.enter(p.name, time.Now())
		}
	}
}

// begin sets the time of the server's start, at which the first phase begins.
func (l *logbook) begin(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = now
}

// enter ends the current phase and begins another. It does nothing if the phase is the same.
func (l *logbook) enter(phase string, now time.Time) {
	if phase == l.phase {
		return
	}
	l.parts = addPart(l.parts, cmp.Or(l.phase, firstPhase), now.Sub(l.began))
	l.phase, l.began = phase, now
}

// addPart adds a duration to the part with this name, or appends a new part. A phase can come twice: profiling comes
// before and after a compilation.
func addPart(parts []Part, name string, took time.Duration) []Part {
	if i := slices.IndexFunc(parts, func(p Part) bool { return p.Name == name }); i >= 0 {
		parts[i].Took += took
		return parts
	}
	return append(parts, Part{Name: name, Took: took})
}

// learn keeps the first line of each kind. An exception of the engine replaces an exception of the API server, because
// the API server only repeats what the engine reported.
func (s *signs) learn(text string, ofEngine, loaded bool) {
	if survived().MatchString(text) {
		return
	}
	if frame().MatchString(text) { // a traceback's line of code does not tell what failed
		if !marks().MatchString(text) {
			s.code = shorten(text)
		}
		return
	}
	if e := recognise(text, loaded); e != nil && (s.known == nil || s.yields(e, loaded)) {
		if pydanticField().MatchString(e.Evidence) { // the previous line names the field
			e.Evidence = s.last + ": " + e.Evidence
		}
		s.known, s.at = e, time.Now()
	}
	if !pointer().MatchString(text) && !wrapper().MatchString(text) {
		s.last = shorten(text)
	}
	if g := usageError().FindStringSubmatch(text); g != nil {
		s.usage = shorten(g[1])
	}
	switch {
	case wrapper().MatchString(text):
		if s.wrapper == "" {
			s.wrapper = shorten(text)
			if loaded && !s.ofEngine {
				s.exception = "" // the exception came from a failed request, and the server survived it
			}
		}
	case exception().MatchString(text) && !pointer().MatchString(text):
		if s.exception == "" || ofEngine && !s.ofEngine {
			s.exception, s.ofEngine = shorten(text), ofEngine
			if !strings.Contains(text, ": ") && s.code != "" { // a bare AssertionError says nothing
				s.exception += ", at: " + s.code
			}
		}
	}
}

// yields reports whether a new failure replaces the known one. An old error line, or a fault of the machine, must not
// hide the real cause. For example, an error of NCCL may follow from a lack of memory. A rank that does not answer may
// wait for another rank that NCCL lost.
func (s *signs) yields(to *ExitError, loaded bool) bool {
	switch {
	case s.known.Cause == NCCL:
		return to.Cause != NCCL
	case s.known.Class == Hang:
		return to.Cause == NCCL
	case !loaded && s.known.Fatal(): // a server that reports on its memory has already found its model and its files
		return to.Class == OOMStart || to.Class == KVTooSmall
	}
	return loaded && (s.known.Class == Infrastructure || time.Since(s.at) > staleSign)
}

// recognise returns the failure that deathPatterns gives for a line, or nil.
func recognise(text string, loaded bool) *ExitError {
	for _, d := range deathPatterns {
		g := d.text().FindStringSubmatch(text)
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

// endStart ends the start and returns its parts. After this call, a death counts as a death under load.
func (l *logbook) endStart(now time.Time) []Part {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.parts = addPart(l.parts, cmp.Or(l.phase, firstPhase), now.Sub(l.began))
	l.loaded, l.signs = true, signs{}
	return l.parts
}

// snapshot returns a copy of the current state.
func (l *logbook) snapshot() logState {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := l.logState
	now.tail, now.args = slices.Clone(l.tail), maps.Clone(l.args)
	return now
}

// progress describes the phase for users. While weights are loaded, it adds the percentage.
func (l *logState) progress() string {
	if l.phase == loadingPhase && l.shards > 0 {
		return fmt.Sprintf("%s, %d %%", l.phase, l.shards)
	}
	return l.phase
}

// death explains the end of a server from its log. It takes the first explanation that exists, in this order: a failure
// that deathPatterns knows; an end from outside; the first exception, preferably the engine's; a line that only says
// that something failed. If none of these exists, death tells how the process ended.
func (l *logbook) death(end exitState) *ExitError {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.signs
	e := &ExitError{Class: StartCrash, Evidence: end.words}
	if l.loaded {
		e.Class = CrashLoad
		if end.code == 0 && !s.ofEngine { // no flag makes a server exit with code 0
			e.Class, e.Cause = Infrastructure, ExitZero
		}
	}
	bySignal := signalFailure(end.status(), l.loaded, end.words)
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
		e.Class, e.Cause, e.Evidence = CrashLoad, EngineDead, cmp.Or(s.exception, s.tellingLine(s.wrapper), end.words)
	case s.exception != "" && (!l.loaded || s.ofEngine || end.code > 0):
		e.Evidence = s.exception
	case s.wrapper != "":
		e.Evidence = cmp.Or(s.tellingLine(s.wrapper), end.words)
	case (end.code == 126 || end.code == 127) && !l.loaded: // a shell exits with these codes when it cannot run a program
		e.Class, e.Cause, e.Evidence = Infrastructure, Command, cmp.Or(l.lastLine(), end.words)
	case end.code == 2 && !l.loaded && s.usage != "":
		e.Class, e.Evidence = FlagsRejected, s.usage
	case !l.loaded && end.code > 0:
		e.Evidence = cmp.Or(l.lastLine(), end.words)
	}
	e.Code, e.Tail = end.code, slices.Clone(l.tail)
	return e
}

// failure returns the failure of a server that still runs, with the last lines of its log.
func (l *logbook) failure(class Class, cause Cause, format string, args ...any) *ExitError {
	return &ExitError{Class: class, Cause: cause, Evidence: fmt.Sprintf(format, args...), Code: -1, Tail: l.snapshot().tail}
}

// An exitState says how a server's first process ended.
type exitState struct {
	code   int            // exit code; -1 when the process still runs or was ended by a signal
	signal syscall.Signal // 0 when no signal ended the process
	words  string         // description for people; empty when the process still runs
}

// status returns the exit code, or minus the number of the signal that ended the process. It is 0 while the process
// runs.
func (e exitState) status() int {
	if e.signal != 0 {
		return -int(e.signal)
	}
	return max(e.code, 0)
}

// tellingLine returns the given line. But if that line only refers to other lines, tellingLine returns the last line
// that says more.
func (s *signs) tellingLine(line string) string {
	if pointer().MatchString(line) {
		return s.last
	}
	return line
}

// lastLine returns the last line of the log; empty when there is none.
func (l *logState) lastLine() string {
	if len(l.tail) == 0 {
		return ""
	}
	return l.tail[len(l.tail)-1]
}
