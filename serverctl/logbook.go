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
	tailLines    = 50
	longestLine  = 64 << 10 // a longer one is cut: some libraries print whole configurations
	longestInErr = 1000     // bytes of a line that an error or a tail keeps
)

// staleSign is how long after a sign under load its death may come. What a server survives for longer was not deadly.
const staleSign = 30 * time.Second

// A logbook reads a server's log line by line: it keeps the facts, the first sign of every kind of death and the last
// lines, and passes everything on without secrets. It is an io.Writer that never fails.
type logbook struct {
	to      io.Writer // the full log; may be nil
	secrets secrets   // none unless given

	mu         sync.Mutex
	writeErr   error // the first of to's
	partial    []byte
	tail       []string
	facts      Facts
	phase      string    // what the server is at; empty until its log tells
	began      time.Time // of the phase; zero before begin
	shards     int       // percent of the weights' files that are loaded, while they are
	args       map[string]string
	parts      []Part // the phases that are over
	loaded     bool   // the server was ready: what dies now dies of the load
	resetsDone int
	resetsLost int
	signs      signs
}

// signs are the first lines of the present stage (start or load) that tell of a death.
type signs struct {
	known     *ExitError // matched a death
	at        time.Time  // when known came
	outside   *ExitError // somebody ended it, before anything failed
	asked     string     // its engine was asked to end, by its API server or from outside
	exception string     // an exception that is not known
	ofEngine  bool       // the exception is the engine's, or a worker's
	code      string     // the last line of code in a traceback
	wrapper   string     // says that something failed, not what
	usage     string     // a line of argparse's
	last      string     // the last line that says something of its own
}

// Write takes output in pieces of any size.
func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(b)
	for {
		line, rest, whole := bytes.Cut(b, []byte{'\n'})
		if room := longestLine - len(l.partial); room > 0 {
			l.partial = append(l.partial, line[:min(room, len(line))]...)
		}
		if !whole {
			break
		}
		l.endLine()
		b = rest
	}
	// A progress bar draws itself again and again after a carriage return; only the last drawing is of interest.
	if i := bytes.LastIndexByte(l.partial, '\r'); i > 0 && i < len(l.partial)-1 {
		l.partial = append(l.partial[:0], l.partial[i:]...)
	}
	if !l.loaded {
		l.seeShards(l.partial)
	}
	return n, nil
}

// seeShards keeps how much of the weights is loaded.
func (l *logbook) seeShards(line []byte) {
	if g := shardsLoaded.FindSubmatch(line); g != nil {
		l.shards = int(number(string(g[1])))
	}
}

// close takes what is left without a line break, and returns the first error of the full log.
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

// endLine takes the line in partial.
func (l *logbook) endLine() {
	line := strings.TrimRight(string(l.partial), "\r")
	l.partial = l.partial[:0]
	if len(line) == longestLine { // it may have been cut in the middle of a secret
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

// learn takes from a line what it tells.
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

// begin says when the server was started, from which on its phases count.
func (l *logbook) begin(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.began = now
}

// enter ends the phase at hand.
func (l *logbook) enter(phase string, now time.Time) {
	if phase == l.phase {
		return
	}
	l.parts = addPart(l.parts, cmp.Or(l.phase, firstPhase), now.Sub(l.began))
	l.phase, l.began = phase, now
}

// addPart adds to the part of that name: phases come more than once, such as profiling before and after a compilation.
func addPart(parts []Part, name string, took time.Duration) []Part {
	if i := slices.IndexFunc(parts, func(p Part) bool { return p.Name == name }); i >= 0 {
		parts[i].Took += took
		return parts
	}
	return append(parts, Part{Name: name, Took: took})
}

// learn keeps the first line of each kind. Of exceptions the engine's goes before the API server's, which only echoes it.
func (s *signs) learn(text string, ofEngine, loaded bool) {
	if survived.MatchString(text) {
		return
	}
	if frame.MatchString(text) { // what a line of code says is no news
		if !marks.MatchString(text) {
			s.code = shorten(text)
		}
		return
	}
	if e := recognise(text, loaded); e != nil && (s.known == nil || s.yields(e, loaded)) {
		if pydanticField.MatchString(e.Evidence) { // the line before names it
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
				s.exception = "" // one of a request that failed, while the server went on
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

// yields reports whether the known death gives way to a later one: an old sign, and what the machine lacked, do not hide what the
// server died of; NCCL's error follows from a lack of memory; a rank that does not answer may wait for one that NCCL lost.
func (s *signs) yields(to *ExitError, loaded bool) bool {
	switch {
	case s.known.Cause == NCCL:
		return to.Cause != NCCL
	case s.known.Class == Hang:
		return to.Cause == NCCL
	case !loaded && s.known.Fatal(): // who comes to count memory has found the model and its files
		return to.Class == OOMStart || to.Class == KVTooSmall
	}
	return loaded && (s.known.Class == Infrastructure || time.Since(s.at) > staleSign)
}

// recognise returns the death that a line tells of, or nil.
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
	if len(line) > longestInErr {
		line = strings.ToValidUTF8(line[:longestInErr], "") + " …"
	}
	return line
}

// ready ends the start, and returns what it went into. From now on a death is the load's.
func (l *logbook) ready(now time.Time) []Part {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.parts = addPart(l.parts, cmp.Or(l.phase, firstPhase), now.Sub(l.began))
	l.loaded, l.signs = true, signs{}
	return l.parts
}

// learnt returns what the log has told so far.
func (l *logbook) learnt() (f Facts, phase string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.phase == loadingPhase && l.shards > 0 {
		return l.facts, fmt.Sprintf("%s, %d %%", l.phase, l.shards)
	}
	return l.facts, l.phase
}

// loading reports whether the weights are being read, and how much of them is there, in percent; 0 is unknown.
func (l *logbook) loading() (is bool, percent int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.phase == loadingPhase, l.shards
}

// nonDefault returns what the server said its command line gave. The map is the caller's.
func (l *logbook) nonDefault() map[string]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	args := maps.Clone(l.args)
	if args == nil {
		args = map[string]string{}
	}
	return args
}

// resets returns how many resets of the prefix cache the log reports, done and failed.
func (l *logbook) resets() (done, lost int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.resetsDone, l.resetsLost
}

// last returns the last lines.
func (l *logbook) last() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.tail)
}

// told reports whether the log has told of a known death.
func (l *logbook) told() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.signs.known != nil
}

// death explains the end of a server by its log: the known death that came first; else an end from outside; else the first
// exception, the engine's before others; else what says that something failed; else how the process ended. code is the exit
// code, -1 when there is none, and ending says in words how the process ended.
func (l *logbook) death(code int, ending string) *ExitError {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.signs
	e := &ExitError{Class: StartCrash, Evidence: ending}
	if l.loaded {
		e.Class = CrashLoad
		if code == 0 && !s.ofEngine { // no flag ends a server in good order
			e.Class, e.Cause = Infrastructure, ExitZero
		}
	}
	bySignal := endedBy(endingCode(code, ending), l.loaded, ending)
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
		e.Class, e.Cause, e.Evidence = CrashLoad, EngineDead, cmp.Or(s.exception, s.telling(s.wrapper), ending)
	case s.exception != "" && (!l.loaded || s.ofEngine || code > 0):
		e.Evidence = s.exception
	case s.wrapper != "":
		e.Evidence = cmp.Or(s.telling(s.wrapper), ending)
	case (code == 126 || code == 127) && !l.loaded: // the shell's, of a program that it cannot run
		e.Class, e.Cause, e.Evidence = Infrastructure, Command, cmp.Or(l.lastLine(), ending)
	case code == 2 && !l.loaded && s.usage != "":
		e.Class, e.Evidence = FlagsRejected, s.usage
	case !l.loaded && code > 0:
		e.Evidence = cmp.Or(l.lastLine(), ending)
	}
	e.Code, e.Tail = code, slices.Clone(l.tail)
	return e
}

// endingCode is the exit code with the signal in it that ended the process: 137 and -9 are SIGKILL.
func endingCode(code int, ending string) int {
	_, name, bySignal := strings.Cut(ending, "signal: ")
	for n := syscall.Signal(1); bySignal && n < 32; n++ {
		if name == n.String() || strings.HasPrefix(name, n.String()+" (") { // (core dumped)
			return -int(n)
		}
	}
	return max(code, 0)
}

// telling returns a line, unless it only points at others: then the last line that says something of its own.
func (s *signs) telling(line string) string {
	if pointer.MatchString(line) {
		return s.last
	}
	return line
}

// lastLine is the last line of the log; empty when there is none.
func (l *logbook) lastLine() string {
	if len(l.tail) == 0 {
		return ""
	}
	return l.tail[len(l.tail)-1]
}

// askedToEnd reports whether somebody asked the server to end, and so whether it hangs of that.
func (l *logbook) askedToEnd() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.signs.outside != nil
}
