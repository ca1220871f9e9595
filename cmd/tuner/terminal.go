package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"vllmtuner/foreign"
	"vllmtuner/render"
)

// usualWidth is that of a terminal nobody has widened, and of a pipe.
const usualWidth = 80

// columns is how wide a text for w may be: as its terminal, or else as COLUMNS says.
func columns(w io.Writer) int {
	if width, _, ok := terminalSize(w); ok {
		return width
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 {
		return n
	}
	return usualWidth
}

// lineColumns is how wide a line of a log may be. In a pipe it stays whole, for programs look for words in it.
func lineColumns(w io.Writer) int {
	if width, _, ok := terminalSize(w); ok {
		return width
	}
	return math.MaxInt
}

// past is the terminal behind the writer that keeps the words of others from it. Only our own sequences are written there.
func past(w io.Writer) io.Writer {
	if filter, ok := w.(*foreign.Writer); ok {
		return filter.Unwrap()
	}
	return w
}

// terminalSize is that of the terminal that w is.
func terminalSize(w io.Writer) (width, height int, ok bool) {
	f, isFile := past(w).(*os.File)
	if !isFile {
		return 0, 0, false
	}
	width, height, err := term.GetSize(int(f.Fd()))
	return width, height, err == nil && width > 0
}

// sayLines writes a text of lines. On a terminal long ones are broken between words, but those that are indented, which show a place in a file.
func sayLines(w io.Writer, text string) {
	width := lineColumns(w)
	for line := range strings.SplitSeq(text, "\n") {
		if render.Width(line) <= width || strings.HasPrefix(line, " ") {
			fmt.Fprintln(w, line)
			continue
		}
		for _, part := range render.Wrap(line, width) {
			fmt.Fprintln(w, part)
		}
	}
}

// warn says what works, with less than is wanted.
func warn(w io.Writer, format string, args ...any) {
	sayLines(w, "warning: "+fmt.Sprintf(format, args...))
}

// canDraw reports whether w is a terminal on which a line can be written over.
func canDraw(w io.Writer) bool {
	f, ok := past(w).(*os.File)
	return ok && term.IsTerminal(int(f.Fd())) && os.Getenv("TERM") != "dumb"
}

// What a terminal is told (ECMA-48). None of it is a colour, so NO_COLOR changes nothing.
const (
	eraseLine = "\x1b[K" // from the cursor to the end of the line
	eraseDown = "\x1b[J" // from the cursor to the end of the screen
	goHome    = "\x1b[H"
	otherPage = "\x1b[?1049h" // and back: the page before is as it was
	firstPage = "\x1b[?1049l"
)

// freshLine takes away what a last line has left where something else is to be written.
func freshLine(w io.Writer) string {
	if canDraw(w) {
		return "\r" + eraseLine
	}
	return ""
}

// drawEvery is how often the last line is drawn: what changes faster nobody reads. Tests want more of them.
var drawEvery = 200 * time.Millisecond

// A liveLine is the last line of a terminal, which is written over again and again. It never reaches the last column, after which a
// terminal would begin another line. A nil one shows nothing.
type liveLine struct {
	w    io.Writer
	stop chan struct{}
	gone chan struct{}

	mu    sync.Mutex // of w and all below
	stage stage
	shown bool // the line is on the screen
}

// newLiveLine returns nil where w is no terminal that can draw one. Whoever gets one calls end.
func newLiveLine(w io.Writer) *liveLine {
	if !canDraw(w) {
		return nil
	}
	l := &liveLine{w: past(w), stop: make(chan struct{}), gone: make(chan struct{})}
	go l.draw()
	return l
}

// draw keeps the line as the stage is: the time that is left runs, and the terminal may become narrower.
func (l *liveLine) draw() {
	defer close(l.gone)
	tick := time.NewTicker(drawEvery)
	defer tick.Stop()
	for {
		select {
		case <-l.stop:
			return
		case <-tick.C:
			l.mu.Lock()
			if l.stage != (stage{}) {
				fmt.Fprint(l.w, "\r"+foreign.Text(l.stage.line(columns(l.w)-1))+eraseLine)
				l.shown = true
			}
			l.mu.Unlock()
		}
	}
}

// show has the line say this from now on.
func (l *liveLine) show(s stage) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stage = s
}

// above takes the line away while something is written that stays.
func (l *liveLine) above(write func()) {
	if l == nil {
		write()
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shown {
		fmt.Fprint(l.w, "\r"+eraseLine)
		l.shown = false
	}
	write()
}

// end takes the line away for good.
func (l *liveLine) end() {
	if l == nil {
		return
	}
	close(l.stop)
	<-l.gone
	l.above(func() {})
}

// A stage is how far something is that takes long.
type stage struct {
	head  string    // what is counted, such as "12 of 30 trials done"
	share float64   // of the whole
	until time.Time // when the whole is done; zero where it is not known
	step  string    // at hand
}

// barWidth is that of the bar in a line with room for it.
const barWidth = 8

// text is the stage in words.
func (s stage) text() string { return s.head + s.left() + s.tail() }

func (s stage) left() string {
	if left := render.Left(time.Until(s.until)); left != "" {
		return ", " + left
	}
	return ""
}

func (s stage) tail() string {
	if s.step != "" {
		return ": " + s.step
	}
	return ""
}

// line writes the stage in so many columns. Where they are few it has no bar, then no time that is left, and the rest is clipped.
func (s stage) line(width int) string {
	short := s.head + s.tail()
	for _, line := range []string{render.Bar(s.share, barWidth) + " " + s.text(), s.text(), short} {
		if render.Width(line) <= width {
			return line
		}
	}
	return render.Clip(short, width)
}

// after is when something is over that takes so long still; zero where that is not known.
func after(left time.Duration) time.Time {
	if left <= 0 {
		return time.Time{}
	}
	return time.Now().Add(left)
}
