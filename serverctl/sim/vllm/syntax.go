package vllm

import (
	"strings"
	"unicode/utf8"
)

// deepest is how many arrays and objects may stand within each other. Python 3.12 answers 1,000 and stumbles over 1,500, by the
// stack that is left.
const deepest = 1000

// tooDeep is what is said of a text that Python ends reading with a RecursionError.
const tooDeep = "maximum recursion depth exceeded"

// pythonSyntax says what Python's json module says of a text that is no JSON, and where (json/decoder.py and json/scanner.py,
// 3.12). Positions count characters.
func pythonSyntax(text []byte) (said string, position int) {
	s := &scanner{text: string(text)}
	s.space()
	if s.value() {
		s.space()
		if s.at < len(s.text) {
			s.fail("Extra data", s.at)
		}
	}
	return s.said, utf8.RuneCountInString(s.text[:min(s.wrong, len(s.text))])
}

// A scanner goes through a text of JSON up to its first mistake.
type scanner struct {
	text  string
	at    int
	depth int
	said  string
	wrong int // where
}

func (s *scanner) fail(said string, at int) bool {
	if s.said == "" {
		s.said, s.wrong = said, at
	}
	return false
}

func (s *scanner) space() {
	for s.at < len(s.text) && strings.IndexByte(" \t\n\r", s.text[s.at]) >= 0 {
		s.at++
	}
}

// peek returns the next byte; 0 at the end.
func (s *scanner) peek() byte {
	if s.at < len(s.text) {
		return s.text[s.at]
	}
	return 0
}

func (s *scanner) value() bool {
	rest := s.text[s.at:]
	switch c := s.peek(); {
	case c == '"':
		return s.str()
	case c == '{' || c == '[':
		if s.depth++; s.depth > deepest {
			return s.fail(tooDeep, s.at)
		}
		defer func() { s.depth-- }()
		if c == '{' {
			return s.object()
		}
		return s.array()
	}
	for _, word := range []string{"null", "true", "false", "NaN", "Infinity", "-Infinity"} {
		if strings.HasPrefix(rest, word) {
			s.at += len(word)
			return true
		}
	}
	n := len(rest) - len(strings.TrimLeft(rest, "+-.eE0123456789"))
	if n == 0 || !strings.ContainsAny(rest[:1], "-0123456789") || rest[:n] == "-" {
		return s.fail("Expecting value", s.at)
	}
	s.at += n
	return true
}

func (s *scanner) str() bool {
	begin := s.at
	for s.at++; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; {
		case c == '"':
			s.at++
			return true
		case c == '\\':
			s.at++
			if s.at < len(s.text) && strings.IndexByte(`"\/bfnrtu`, s.text[s.at]) < 0 {
				return s.fail(`Invalid \escape`, s.at-1)
			}
		case c < ' ':
			return s.fail("Invalid control character at", s.at)
		}
	}
	return s.fail("Unterminated string starting at", begin)
}

func (s *scanner) object() bool {
	s.at++
	s.space()
	if s.peek() == '}' {
		s.at++
		return true
	}
	for {
		if s.peek() != '"' {
			return s.fail("Expecting property name enclosed in double quotes", s.at)
		}
		if !s.str() {
			return false
		}
		if s.space(); s.peek() != ':' {
			return s.fail("Expecting ':' delimiter", s.at)
		}
		s.at++
		if s.space(); !s.value() {
			return false
		}
		s.space()
		switch s.peek() {
		case '}':
			s.at++
			return true
		case ',':
			s.at++
			s.space()
		default:
			return s.fail("Expecting ',' delimiter", s.at)
		}
	}
}

func (s *scanner) array() bool {
	s.at++
	s.space()
	if s.peek() == ']' {
		s.at++
		return true
	}
	for {
		if !s.value() {
			return false
		}
		s.space()
		switch s.peek() {
		case ']':
			s.at++
			return true
		case ',':
			s.at++
			s.space()
		default:
			return s.fail("Expecting ',' delimiter", s.at)
		}
	}
}
