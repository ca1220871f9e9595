package render

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// How often progress is shown. Tests show it more often.
var (
	DrawEvery = 200 * time.Millisecond // on a terminal; nobody reads what changes faster
	LogEvery  = 10 * time.Second       // in a log, which needs a sign of life and not every step
)

// A Progress shows how far a long task is: on a terminal in a last line that is drawn again and again, elsewhere in a line
// now and then. The last line never reaches the last column, after which a terminal would begin another line.
type Progress struct {
	w    io.Writer
	stop chan struct{} // nil where w is no terminal that can draw
	gone chan struct{}

	mu     sync.Mutex // guards w and all below
	stage  Stage
	shown  bool      // the last line is on the screen
	logged time.Time // when the log got its last line
}

// NewProgress starts to show progress on w. Whoever calls it calls End.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w}
	if canDraw(w) {
		p.stop, p.gone = make(chan struct{}), make(chan struct{})
		go p.draw()
	}
	return p
}

// Draws reports whether there is a last line that is drawn again and again.
func (p *Progress) Draws() bool { return p.stop != nil }

// Quietly lets a log begin LogEvery from now. By default it begins with the first step.
func (p *Progress) Quietly() *Progress {
	p.logged = time.Now()
	return p
}

// draw keeps the last line up to date: the remaining time runs down, and the terminal may become narrower.
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
				fmt.Fprint(unfiltered(p.w), "\r"+clean(p.w, p.stage.line(Columns(p.w)-1))+eraseLine)
				p.shown = true
			}
			p.mu.Unlock()
		}
	}
}

// Show has the last line say this from now on. A log gets it as a line if its last one is old enough.
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

// Print writes lines that stay. They stand above the last line.
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

// Line writes a line that stays. A terminal that is too narrow for it gets several, the later ones indented by margin.
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

// End removes the last line for good.
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
	Share float64   // of the whole
	Until time.Time // when the whole is done; zero where that is not known
	Step  string    // what goes on now
	Plain string    // how a log says it, before the remaining time; "" where it says the same as a terminal
}

// barWidth is the width of the bar in a line that has room for one.
const barWidth = 8

// Text is the stage as a sentence.
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

// line writes the stage in at most width columns. It leaves out the bar first, then the remaining time, and clips the rest.
func (s Stage) line(width int) string {
	short := s.Head + s.tail()
	for _, line := range []string{Bar(s.Share, barWidth) + " " + s.Text(), s.Text(), short} {
		if Width(line) <= width {
			return line
		}
	}
	return Clip(short, width)
}

// After is the time at which a task ends that takes so long still; zero where that is not known.
func After(left time.Duration) time.Time {
	if left <= 0 {
		return time.Time{}
	}
	return time.Now().Add(left)
}
