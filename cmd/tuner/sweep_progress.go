package main

import (
	"fmt"
	"io"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial"
)

// A sweepProgress tells how far a sweep is: a line for each measured load, and on a terminal a last line. In virtual time a line for
// each config is enough.
type sweepProgress struct {
	s      *sweeping
	w      io.Writer
	live   *liveLine     // nil when w is no terminal
	config *sweptConfig  // at hand
	starts time.Duration // of a server
	began  time.Time
	loads  int // measured, or given up
	last   time.Time
}

func newSweepProgress(s *sweeping) *sweepProgress {
	return &sweepProgress{s: s, w: s.stderr, live: newLiveLine(s.stderr), starts: s.startsIn(), began: time.Now()}
}

// begin is told of the next config.
func (p *sweepProgress) begin(c *sweptConfig) { p.config = c }

// step is told what begins now.
func (p *sweepProgress) step(step string) {
	all := len(p.s.configs) * len(p.s.sweep.Levels)
	now := stage{render.Done(p.loads, all, "load"), float64(p.loads) / float64(max(1, all)), after(p.left()), p.config.Name + ", " + step}
	switch {
	case p.live != nil:
		p.live.show(now)
	case time.Since(p.last) >= lineEvery: // a log needs a sign of life, not every step
		p.last = time.Now()
		p.line("%s", now.text())
	}
}

// probed is told of a measured load.
func (p *sweepProgress) probed(c *sweptConfig, probe trial.Probe) {
	p.loads++
	if p.s.File.Server.Simulate != "" {
		return
	}
	left := render.Left(p.left())
	if left != "" {
		left = " (" + left + ")"
	}
	p.line("%s at %s: %s, %s%s", c.Name, probe.Level(), verdictCell(probe), probe.Verdict.Reason, left)
}

// ended is told that a config is through, or that its server failed.
func (p *sweepProgress) ended(c *sweptConfig) {
	p.loads += len(p.s.sweep.Levels) - len(c.probes)
	if parts := c.result.Facts.StartUp; parts > 0 {
		p.starts = parts
	}
	p.line("%s: %s", c.Name, c.found(p.s.closed()))
}

// left is how long the rest takes; 0 where it is not known. What a closed loop takes is told by what it took.
func (p *sweepProgress) left() time.Duration {
	all := len(p.s.configs) * len(p.s.sweep.Levels)
	switch {
	case p.s.File.Server.Simulate != "" || p.loads == all || p.s.closed() && p.loads == 0:
		return 0
	case p.s.closed():
		return time.Since(p.began) / time.Duration(p.loads) * time.Duration(all-p.loads)
	}
	return p.planned()
}

// planned is how long what has not been measured takes on servers that keep up.
func (p *sweepProgress) planned() time.Duration {
	left := time.Duration(0)
	for i := range p.s.configs {
		switch c := &p.s.configs[i]; {
		case c.done:
		case !c.begun:
			left += p.starts + p.s.sweep.Planned()
		default:
			for _, level := range p.s.sweep.Levels[len(c.probes):] {
				left += p.s.sweep.Cooldown + p.s.sweep.Takes(level)
			}
		}
	}
	return left
}

// line writes a line above the last one. Where it is too long it goes on below, two columns in.
func (p *sweepProgress) line(format string, args ...any) {
	width := lineColumns(p.w)
	p.live.above(func() {
		for i, line := range render.Wrap(fmt.Sprintf(format, args...), width-2) {
			if i > 0 {
				line = "  " + line
			}
			fmt.Fprintln(p.w, render.Clip(line, width))
		}
	})
}

// done takes the last line away.
func (p *sweepProgress) done() error {
	p.live.end()
	return nil
}
