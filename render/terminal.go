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

// defaultWidth is the usual width of a terminal, and the width of text in a pipe.
const defaultWidth = 80

// A Filter removes control characters that come from outside, as foreign.Writer does. This package writes its own
// control sequences to the writer behind the filter.
type Filter interface {
	io.Writer
	Unwrap() io.Writer
	Clean(text string) string
}

// Columns returns how wide a text for w may be. This is the width of w's terminal. Without a terminal it is COLUMNS,
// and without COLUMNS it is 80. No other function decides on a width: callers pass it on.
func Columns(w io.Writer) int {
	if width, _, ok := terminalSize(w); ok {
		return width
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	return defaultWidth
}

// LineColumns returns how wide a line of a log may be. In a pipe lines are never broken, because programs search them.
func LineColumns(w io.Writer) int {
	if width, _, ok := terminalSize(w); ok {
		return width
	}
	return math.MaxInt
}

// unfiltered returns the writer behind a Filter. That writer accepts this package's own control sequences.
func unfiltered(w io.Writer) io.Writer {
	if filter, ok := w.(Filter); ok {
		return filter.Unwrap()
	}
	return w
}

// filtered returns a text as the Filter w passes it on. If w is no Filter, the text stays as it is. The caller writes
// the text to the writer behind the Filter.
func filtered(w io.Writer, text string) string {
	if filter, ok := w.(Filter); ok {
		return filter.Clean(text)
	}
	return text
}

// terminalSize returns the size of the terminal behind w; ok is false if there is none.
func terminalSize(w io.Writer) (width, height int, ok bool) {
	f, isFile := unfiltered(w).(*os.File)
	if !isFile {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(f.Fd()))
	return width, height, err == nil && width > 0
}

// canDraw reports whether w is a terminal that can overwrite a line.
func canDraw(w io.Writer) bool {
	f, ok := unfiltered(w).(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// Control sequences of a terminal (ECMA-48). None of them sets a colour, so NO_COLOR does not matter.
const (
	eraseLine = "\x1b[K" // from the cursor to the end of the line
	eraseDown = "\x1b[J" // from the cursor to the end of the screen
	goHome    = "\x1b[H"
	otherPage = "\x1b[?1049h" // to the alternate screen
	firstPage = "\x1b[?1049l" // back to the normal screen, which is unchanged
)

// EraseLine erases the current line of the terminal behind w.
func EraseLine(w io.Writer) {
	if canDraw(w) {
		fmt.Fprint(unfiltered(w), "\r"+eraseLine)
	}
}

// Lines writes lines of text. On a terminal it breaks long lines between words. It never breaks indented lines, because
// they quote a file.
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
