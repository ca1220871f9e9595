// Package foreign makes text from outside safe for a terminal, and opens files that a user names. It never judges their
// content.
package foreign

import (
	"io"
	"slices"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// A Writer passes on text without the characters that control a terminal. It keeps line breaks and tabs. It leaves out
// all other control characters, escape sequences, marks that change the direction of text, and characters without
// width. Bytes that are not UTF-8 become U+FFFD. Several goroutines may use a Writer at the same time.
type Writer struct {
	to io.Writer

	mu      sync.Mutex
	state   escape
	return_ bool // the last character was a carriage return
	rest    partialRune
	out     []byte
}

// NewWriter returns a Writer that passes text on to another writer.
func NewWriter(to io.Writer) *Writer { return &Writer{to: to} }

// Unwrap returns the underlying writer, to which this program writes its own escape sequences.
func (w *Writer) Unwrap() io.Writer { return w.to }

// Text returns a text as a Writer passes it on.
func Text(text string) string {
	var w Writer
	w.rest.decode([]byte(text), w.keep)
	for range w.rest { // w.rest has the bytes of an unfinished character
		w.keep(utf8.RuneError)
	}
	return string(w.out)
}

// Clean returns a text as the Writer would pass it on. The caller writes that text to the underlying writer, together
// with this program's own escape sequences.
func (w *Writer) Clean(text string) string { return Text(text) }

// Write accepts pieces of any size. A piece may end within a character or an escape sequence.
func (w *Writer) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.out = w.out[:0]
	w.rest.decode(b, w.keep)
	if len(w.out) == 0 {
		return len(b), nil
	}
	if _, err := w.to.Write(w.out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// A partialRune holds the first bytes of a character whose other bytes have not been written yet.
type partialRune []byte

// decode calls keep with each character that is complete.
func (p *partialRune) decode(b []byte, keep func(r rune)) {
	rest := append(*p, b...)
	for len(rest) > 0 && utf8.FullRune(rest) {
		r, size := utf8.DecodeRune(rest)
		keep(r)
		rest = rest[size:]
	}
	*p = slices.Clone(rest) // at most three bytes; without the clone they would keep the whole array in memory
}

// An escape is a position in an escape sequence (ECMA-48).
type escape int

const (
	noEscape  escape = iota
	escapeAny        // after ESC
	escapeCSI        // after ESC [ or the C1 character for it, up to a letter
	escapeOSC        // after ESC ] or the C1 character for it, up to BEL or ESC \
)

// keep adds a character if it is text. A line break ends any escape sequence, so an unfinished sequence removes only
// the rest of its line.
func (w *Writer) keep(r rune) {
	after := w.return_
	w.return_ = r == '\r'
	switch {
	case r == '\r', r == '\n' && !after: // a carriage return without a line break would let text overwrite the line
		w.state = noEscape
		w.out = append(w.out, '\n')
	case r == '\n': // the carriage return before this line break has already ended the line
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

// hidden reports whether a character is invisible, or changes how the text around it is shown.
func hidden(r rune) bool {
	switch {
	case r == '\n', r == '\t':
		return false
	case unicode.In(r, unicode.Cf):
		return !unicode.Is(unicode.Prepended_Concatenation_Mark, r) // these format characters are visible, for example the Arabic number sign
	}
	return unicode.In(r, unicode.Cc, unicode.Zl, unicode.Zp, unicode.Other_Default_Ignorable_Code_Point)
}
