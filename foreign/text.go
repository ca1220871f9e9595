// Package foreign takes in what comes from outside: text for a terminal, and files that a user names. It never judges
// what they say.
package foreign

import (
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// A Writer passes on text and nothing that a terminal would obey: no control characters but the line break and the tab,
// no escape sequences, nothing that turns the direction of text or that has no width. What is no UTF-8 becomes U+FFFD.
// Several goroutines may use it.
type Writer struct {
	to io.Writer

	mu      sync.Mutex
	state   escape
	return_ bool   // the last character was a carriage return
	rest    []byte // the beginning of a character whose end is still to come
	out     []byte
}

// NewWriter returns a Writer to another one.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Unwrap returns the writer behind this one, for escape sequences of our own.
func (w *Writer) Unwrap() io.Writer { return w.to }

// Text is what a Writer would pass on of a text.
func Text(text string) string {
	var w Writer
	w.add([]byte(text))
	for range w.rest {
		w.keep(utf8.RuneError)
	}
	return string(w.out)
}

// Clean returns what a Writer would pass on of a text, for what is written past it together with escape sequences of our own.
func (w *Writer) Clean(text string) string { return Text(text) }

// Write takes pieces of any size.
func (w *Writer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.out = w.out[:0]
	w.add(b)
	if len(w.out) == 0 {
		return len(b), nil
	}
	if _, err := w.to.Write(w.out); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (w *Writer) add(b []byte) {
	w.rest = append(w.rest, b...)
	for len(w.rest) > 0 && utf8.FullRune(w.rest) {
		r, size := utf8.DecodeRune(w.rest)
		w.keep(r)
		w.rest = w.rest[size:]
	}
	w.rest = slices.Clone(w.rest) // at most three bytes: the rest of the array is given back
}

// An escape says where in an escape sequence (ECMA-48) a text is.
type escape int

const (
	noEscape  escape = iota
	escapeAny        // after ESC
	escapeCSI        // after ESC [ or its C1 form, up to a letter
	escapeOSC        // after ESC ] or its C1 form, up to BEL or ESC \
)

// keep adds a character if it is text. A line break ends any sequence, so that a broken one costs no more than its line.
func (w *Writer) keep(r rune) {
	after := w.return_
	w.return_ = r == '\r'
	switch {
	case r == '\r', r == '\n' && !after: // a lone return would let a line be overwritten
		w.state = noEscape
		w.out = append(w.out, '\n')
	case r == '\n': // which the return has ended already
	case r == 0x1b:
		w.state = escapeAny
	case r == 0x9b, w.state == escapeAny && r == '[':
		w.state = escapeCSI
	case strings.ContainsRune("\u0090\u0098\u009d\u009e\u009f", r), w.state == escapeAny && strings.ContainsRune("]PX^_", r):
		w.state = escapeOSC
	case w.state == noEscape:
		if !hidden(r) {
			w.out = utf8.AppendRune(w.out, r)
		}
	case w.state == escapeAny && r >= 0x30, w.state == escapeCSI && r >= 0x40, w.state == escapeOSC && (r == 0x07 || r == 0x9c):
		w.state = noEscape
	}
}

// hidden reports whether a character does something to a text, or is in it, without being seen.
func hidden(r rune) bool {
	switch {
	case r == '\n', r == '\t':
		return false
	case unicode.In(r, unicode.Cf):
		return !unicode.Is(unicode.Prepended_Concatenation_Mark, r) // such as the Arabic number sign, which is seen
	}
	return unicode.In(r, unicode.Cc, unicode.Zl, unicode.Zp, unicode.Other_Default_Ignorable_Code_Point)
}
