package serverctl

import (
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
)

const (
	tailLines    = 20
	longestLine  = 64 << 10 // a longer one is cut: some libraries print whole configurations
	longestInErr = 1000     // bytes of a line that an error or a tail keeps
)

// A logbook reads a server's log line by line: it keeps the facts, the first sign of every kind of death and the last
// lines, and passes everything on without secrets. It is an io.Writer that never fails.
type logbook struct {
	to      io.Writer         // the full log; may be nil
	secrets *strings.Replacer // may be nil

	mu         sync.Mutex
	writeErr   error // the first of to's
	partial    []byte
	tail       []string
	facts      Facts
	phase      string
	loaded     bool // the server was ready: what dies now dies of the load
	resetsDone int
	resetsLost int
	signs      signs
}

// signs are the first lines of the present stage (start or load) that tell of a death.
type signs struct {
	known     *ExitError // matched a death
	exception string     // an exception that is not known
	wrapper   string     // says that something failed, not what
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
	return n, nil
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
	line = colours.ReplaceAllString(line[strings.LastIndexByte(line, '\r')+1:], "")
	if l.secrets != nil {
		line = l.secrets.Replace(line)
	}
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
	text := processPrefix.ReplaceAllString(line, "")
	level := levelPrefix.FindStringSubmatch(text)
	if level != nil {
		text = text[len(level[0]):]
	}
	if level == nil || level[1] == "ERROR" || level[1] == "CRITICAL" {
		l.signs.learn(text, l.loaded)
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
	for _, f := range facts {
		if g := f.text.FindStringSubmatch(text); g != nil {
			f.read(&l.facts, g)
		}
	}
	for _, p := range phases {
		if p.text.MatchString(text) {
			l.phase = p.name
		}
	}
}

// learn keeps the first line of each kind.
func (s *signs) learn(text string, loaded bool) {
	if s.known == nil {
		s.known = recognise(text, loaded)
	}
	switch {
	case wrapper.MatchString(text):
		if s.wrapper == "" {
			s.wrapper = shorten(text)
			if loaded {
				s.exception = "" // one of a request that failed, while the server went on
			}
		}
	case s.exception == "" && exception.MatchString(text):
		s.exception = shorten(text)
	}
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
		e := &ExitError{Class: class, Evidence: shorten(g[min(1, len(g)-1)])}
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

// ready ends the start: from now on a death is the load's.
func (l *logbook) ready() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loaded, l.signs = true, signs{}
}

// learnt returns what the log has told so far.
func (l *logbook) learnt() (f Facts, phase string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.facts, l.phase
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

// death explains the end of a server by its log: the known death that came first, else the first exception, else what
// says that something failed, else how the process ended. code is the exit code, -1 when there is none.
func (l *logbook) death(code int, ending string) *ExitError {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := &ExitError{Class: StartCrash, Evidence: ending}
	if l.loaded {
		e.Class = CrashLoad
	}
	switch s := l.signs; {
	case s.known != nil:
		*e = *s.known
	case s.exception != "":
		e.Evidence = s.exception
	case s.wrapper != "":
		e.Evidence = s.wrapper
	case code == 2 && !l.loaded: // argparse's, whatever it wrote
		e.Class = FlagsRejected
		if len(l.tail) > 0 {
			e.Evidence = l.tail[len(l.tail)-1]
		}
	}
	e.Code, e.Tail = code, slices.Clone(l.tail)
	return e
}
