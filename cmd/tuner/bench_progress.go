package main

import (
	"fmt"
	"io"
	"time"

	"vllmtuner/bench"
)

// A benchProgress tells how far one run is: on a terminal in its last line, else in a line now and then.
type benchProgress struct {
	w       io.Writer
	shot    shot
	live    *liveLine // nil when w is no terminal
	began   time.Time
	last    time.Time
	planned time.Duration // until the window ends; 0 when it ends by number
}

func newBenchProgress(w io.Writer, s shot) *benchProgress {
	p := &benchProgress{w: w, live: newLiveLine(w), shot: s, began: time.Now(), last: time.Now()}
	if s.window > 0 {
		p.planned = s.leadIn + s.window
	}
	return p
}

// lineEvery is how often a log is told that a run goes on.
const lineEvery = 10 * time.Second

// show is told once a second.
func (p *benchProgress) show(at bench.Progress) {
	now := stage{fmt.Sprint(p.shot), p.share(at), after(p.left(at)), p.text(at)}
	switch {
	case p.live != nil:
		p.live.show(now)
	case time.Since(p.last) >= lineEvery:
		p.last = time.Now()
		fmt.Fprintf(p.w, "%s  %s%s\n", p.shot, now.step, now.left())
	}
}

// share is how much of the run is over.
func (p *benchProgress) share(at bench.Progress) float64 {
	if p.planned > 0 {
		return at.Now.Seconds() / p.planned.Seconds()
	}
	return float64(at.Ended) / float64(max(1, p.shot.planned))
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

// left is how long it will take still; 0 where it is not known.
func (p *benchProgress) left(at bench.Progress) time.Duration {
	if p.planned == 0 && at.Ended > 0 {
		return time.Duration(float64(at.Now) * float64(p.shot.planned-at.Ended) / float64(at.Ended))
	}
	return p.planned - at.Now
}

// done takes the last line away.
func (p *benchProgress) done() error {
	p.live.end()
	return nil
}
