package render

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// Intervals at which progress is shown. Tests shorten them.
var (
	DrawEvery = 200 * time.Millisecond // interval on a terminal; nobody can read faster changes
	LogEvery  = 10 * time.Second       // interval in a log, which needs only a sign of life
)

// A Progress shows how far a long task is. On a terminal it redraws the last line; elsewhere it writes a line every
// LogEvery. The redrawn line leaves the terminal's last column free, because a terminal begins a new line after that
// column.
type Progress struct {
	w     io.Writer
	began time.Time
	stop  chan struct{} // nil if w cannot redraw lines
	gone  chan struct{} // closed when draw has returned

	mu     sync.Mutex // guards w and the fields below
	stage  Stage
	shown  bool      // the last line is on the screen
	logged time.Time // when the log's last line was written
}

// NewProgress starts to show progress on w. The caller must call End.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w, began: time.Now()}
	if canDraw(w) {
		p.stop, p.gone = make(chan struct{}), make(chan struct{})
		go p.draw()
	}
	return p
}

// Draws reports whether the progress redraws a last line.
func (p *Progress) Draws() bool { return p.stop != nil }

// Quietly delays the first line of a log by LogEvery.
func (p *Progress) Quietly() *Progress {
	p.logged = time.Now()
	return p
}

// draw redraws the last line every DrawEvery, because the remaining time changes and the terminal may become narrower.
func (p *Progress) draw() {
	defer close(p.gone)
	tick := time.NewTicker(DrawEvery)
	defer tick.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-tick.C:
			p.mu.Lock()
			if p.stage != (Stage{}) {
				fmt.Fprint(unfiltered(p.w), "\r"+filtered(p.w, p.stage.line(Columns(p.w)-1))+eraseLine)
				p.shown = true
			}
			p.mu.Unlock()
		}
	}
}

// Show sets the stage for the last line. In a log it writes a new line if the log's last line is older than LogEvery.
func (p *Progress) Show(s Stage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stage = s
	if p.Draws() || time.Since(p.logged) < LogEvery {
		return
	}
	p.logged = time.Now()
	line, width := s.log(), LineColumns(p.w)
	if Width(line) <= width {
		p.print([]string{line})
		return
	}
	p.print(Wrap(line, width))
}

// ShowShare shows which share of a task is done. It estimates the end of the task from the time that this share took.
func (p *Progress) ShowShare(head string, share float64) {
	left := time.Duration(float64(time.Since(p.began)) * (1 - share) / share)
	p.Show(Stage{Head: head, Share: share, Until: After(left)})
}

// Print writes lines above the last line. These lines stay.
func (p *Progress) Print(lines []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.print(lines)
}

func (p *Progress) print(lines []string) {
	p.erase()
	width := LineColumns(p.w)
	for _, line := range lines {
		fmt.Fprintln(p.w, Clip(line, width))
	}
}

// Line prints one line. On a terminal that is too narrow, Line breaks it and indents the lines after the first.
func (p *Progress) Line(margin int, format string, args ...any) {
	lines := Wrap(fmt.Sprintf(format, args...), LineColumns(p.w)-margin)
	for i := range lines {
		if i > 0 {
			lines[i] = blank(margin) + lines[i]
		}
	}
	p.Print(lines)
}

func (p *Progress) erase() {
	if p.shown {
		fmt.Fprint(unfiltered(p.w), "\r"+eraseLine)
		p.shown = false
	}
}

// End stops the redrawing and removes the last line.
func (p *Progress) End() {
	if p.stop == nil {
		return
	}
	close(p.stop)
	<-p.gone
	p.mu.Lock()
	defer p.mu.Unlock()
	p.erase()
}

// A Stage is how far a long task is.
type Stage struct {
	Head  string    // what is counted, such as "12 of 30 trials done"
	Share float64   // share that is done, from 0 to 1
	Until time.Time // estimated end; zero if not known
	Step  string    // the current step
	Plain string    // if set, replaces Head and Step in a log
}

const barWidth = 8 // columns

// Text returns the stage as a sentence.
func (s Stage) Text() string { return s.Head + s.left() + s.tail() }

func (s Stage) log() string {
	if s.Plain != "" {
		return s.Plain + s.left()
	}
	return s.Text()
}

func (s Stage) left() string {
	if left := Left(time.Until(s.Until)); left != "" {
		return ", " + left
	}
	return ""
}

func (s Stage) tail() string {
	if s.Step != "" {
		return ": " + s.Step
	}
	return ""
}

// line writes the stage in at most width columns. If the stage is too wide, line drops the bar first, then the
// remaining time, and then clips the rest.
func (s Stage) line(width int) string {
	short := s.Head + s.tail()
	for _, line := range []string{bar(s.Share, barWidth) + " " + s.Text(), s.Text(), short} {
		if Width(line) <= width {
			return line
		}
	}
	return Clip(short, width)
}

// After returns the time at which a task will end, given its remaining time. If the remaining time is 0, it is not
// known, and After returns the zero time.
func After(remaining time.Duration) time.Time {
	if remaining <= 0 {
		return time.Time{}
	}
	return time.Now().Add(remaining)
}
