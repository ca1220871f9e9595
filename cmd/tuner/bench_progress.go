package main

import (
	"fmt"
	"io"
	"time"

	"vllmtuner/bench"
)

// A benchProgress tells how far one run is: on a terminal in a bar, else in a line now and then.
type benchProgress struct {
	w       io.Writer
	shot    shot
	bar     *statusBar // nil when w is no terminal
	began   time.Time
	last    time.Time
	planned time.Duration // until the window ends; 0 when it ends by number
}

func newBenchProgress(w io.Writer, s shot) *benchProgress {
	p := &benchProgress{w: w, shot: s, began: time.Now(), last: time.Now()}
	steps := s.planned
	if s.window > 0 {
		p.planned = s.leadIn + s.window
		steps = int(p.planned / time.Second)
	}
	p.bar = terminalBar(w, max(1, steps))
	return p
}

// lineEvery is how often a log is told that a run goes on.
const lineEvery = 10 * time.Second

// show is told once a second.
func (p *benchProgress) show(at bench.Progress) {
	if p.bar == nil && time.Since(p.last) < lineEvery {
		return
	}
	p.last = time.Now()
	text := p.text(at)
	if p.bar == nil {
		fmt.Fprintf(p.w, "%s  %s%s\n", p.shot, text, p.left(at))
		return
	}
	step := at.Ended
	if p.planned > 0 {
		step = int(at.Now / time.Second)
	}
	p.bar.Describe(text)
	_ = p.bar.Set(min(step, p.bar.GetMax()-1)) // a bar that cannot be drawn is no reason to stop
}

// text says in a few words where the run is.
func (p *benchProgress) text(at bench.Progress) string {
	phase := "window"
	switch {
	case at.Counted == 0:
		phase = "lead-in"
	case at.RunOut, at.Counted >= p.shot.planned:
		phase = "run-out"
	}
	text := fmt.Sprintf("%s %d/%d done, %d in flight", phase, at.Ended, p.shot.planned, at.InFlight)
	if at.Failed > 0 {
		text += fmt.Sprintf(", %d failed", at.Failed)
	}
	if at.TTFT99 > 0 {
		text += fmt.Sprintf(", p99 TTFT %.0f ms", at.TTFT99)
	}
	return text
}

// left says how long it will take still, for a log; a bar has its own.
func (p *benchProgress) left(at bench.Progress) string {
	left := p.planned - at.Now
	if p.planned == 0 && at.Ended > 0 {
		left = time.Duration(float64(at.Now) * float64(p.shot.planned-at.Ended) / float64(at.Ended))
	}
	if left < time.Second {
		return ""
	}
	return fmt.Sprintf(", %s left", left.Round(time.Second))
}

// done removes the bar.
func (p *benchProgress) done() error {
	if p.bar == nil {
		return nil
	}
	return p.bar.Clear()
}
