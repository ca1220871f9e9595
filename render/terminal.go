package render

import (
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"golang.org/x/term"
)

// DefaultWidth is how many columns a terminal has that nobody has widened. Text in a pipe has as many.
const DefaultWidth = 80

// A Filter keeps the control characters of others from a terminal, as foreign.Writer does. This package writes its own
// sequences to the writer behind it.
type Filter interface {
	io.Writer
	Unwrap() io.Writer
	Clean(text string) string
}

// Columns returns how wide a text for w may be: as wide as its terminal, or else as COLUMNS says.
func Columns(w io.Writer) int {
	if width, _, ok := terminalSize(w); ok {
		return width
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	return DefaultWidth
}

// LineColumns returns how wide a line of a log may be. In a pipe a line stays whole, because programs search logs for phrases.
func LineColumns(w io.Writer) int {
	if width, _, ok := terminalSize(w); ok {
		return width
	}
	return math.MaxInt
}

// unfiltered returns the writer behind a Filter, which takes our own control sequences.
func unfiltered(w io.Writer) io.Writer {
	if filter, ok := w.(Filter); ok {
		return filter.Unwrap()
	}
	return w
}

// clean removes the control characters of others from a text that goes around the Filter.
func clean(w io.Writer, text string) string {
	if filter, ok := w.(Filter); ok {
		return filter.Clean(text)
	}
	return text
}

// terminalSize returns the size of the terminal that w writes to; ok is false where it writes to none.
func terminalSize(w io.Writer) (width, height int, ok bool) {
	f, isFile := unfiltered(w).(*os.File)
	if !isFile {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(f.Fd()))
	return width, height, err == nil && width > 0
}

// canDraw reports whether w is a terminal on which a line can be written over.
func canDraw(w io.Writer) bool {
	f, ok := unfiltered(w).(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// Control sequences of a terminal (ECMA-48). None of them is a colour, so NO_COLOR changes nothing.
const (
	eraseLine = "\x1b[K" // from the cursor to the end of the line
	eraseDown = "\x1b[J" // from the cursor to the end of the screen
	goHome    = "\x1b[H"
	otherPage = "\x1b[?1049h" // the terminal's second page
	firstPage = "\x1b[?1049l" // back to the first page, which is as it was
)

// EraseLine removes what a live line left on the terminal behind w.
func EraseLine(w io.Writer) {
	if canDraw(w) {
		fmt.Fprint(unfiltered(w), "\r"+eraseLine)
	}
}

// Lines writes a text of lines. On a terminal it breaks long lines between words, but not indented ones, which quote a file.
func Lines(w io.Writer, text string) {
	width := LineColumns(w)
	for line := range strings.SplitSeq(text, "\n") {
		if Width(line) <= width || strings.HasPrefix(line, " ") {
			fmt.Fprintln(w, line)
			continue
		}
		for _, part := range Wrap(line, width) {
			fmt.Fprintln(w, part)
		}
	}
}

// Warn writes a warning.
func Warn(w io.Writer, format string, args ...any) {
	Lines(w, "warning: "+fmt.Sprintf(format, args...))
}
