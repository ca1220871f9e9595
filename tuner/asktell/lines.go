package asktell

import (
	"bytes"
	"strings"
	"sync"
	"unicode/utf8"

	"vllmtuner/foreign"
)

const (
	// maxLine limits a line of the program's output, in bytes. The longest answer has one value for each parameter.
	maxLine = 64 << 10
	// maxShown limits a line of the program that is shown or quoted, in characters.
	maxShown = 300
	// maxUnread limits the answers that wait. The program answers each question with one line, so one would be enough.
	maxUnread = 8
)

// A splitter cuts a stream into lines.
type splitter struct {
	each func(line string, cut bool) // cut means that the line was longer than maxLine, and only its beginning is given
	rest []byte
	cut  bool
}

func (s *splitter) Write(b []byte) (int, error) {
	n := len(b)
	for {
		line, after, ended := bytes.Cut(b, []byte("\n"))
		room := maxLine - len(s.rest)
		s.cut = s.cut || len(line) > room
		s.rest = append(s.rest, line[:min(len(line), room)]...)
		if !ended {
			return n, nil
		}
		s.end()
		b = after
	}
}

// end ends the line that has begun.
func (s *splitter) end() {
	line, cut := string(s.rest), s.cut
	s.rest, s.cut = s.rest[:0], false
	if strings.TrimSpace(line) != "" {
		s.each(line, cut)
	}
}

// answers holds the lines that the program wrote and that nobody has read.
type answers struct {
	splitter
	ready chan answerLine
}

type answerLine struct {
	text string
	cut  bool
}

func newAnswers() *answers {
	a := &answers{ready: make(chan answerLine, maxUnread)}
	a.each = func(line string, cut bool) {
		select {
		case a.ready <- answerLine{line, cut}:
		default: // one unread line is too many already, and ends the study at the next question
		}
	}
	return a
}

// complaints shows what the program writes to stderr, and keeps the last line.
type complaints struct {
	splitter
	mu   sync.Mutex
	last string
	say  func(line string)
}

func newComplaints(say func(line string)) *complaints {
	c := &complaints{say: say}
	c.each = func(line string, _ bool) {
		line = shown(line)
		c.mu.Lock()
		c.last = line
		say := c.say
		c.mu.Unlock()
		say(line)
	}
	return c
}

// shown returns a line of the program as it may be shown: without control characters, and not too long.
func shown(line string) string {
	line = strings.TrimSpace(foreign.Text(line))
	if utf8.RuneCountInString(line) > maxShown {
		line = string([]rune(line)[:maxShown]) + "…"
	}
	return line
}
