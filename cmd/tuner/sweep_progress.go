package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"vllmtuner/trial"
)

// A sweepProgress tells how far a sweep is: a line for each measured load, and on a terminal a bar. In virtual time a line for
// each config is enough.
type sweepProgress struct {
	s      *sweeping
	w      io.Writer
	bar    *statusBar    // nil when w is no terminal
	config *sweptConfig  // at hand
	starts time.Duration // of a server
	began  time.Time
	loads  int // measured, or given up
	last   time.Time
}

func newSweepProgress(s *sweeping) *sweepProgress {
	p := &sweepProgress{s: s, w: s.stderr, starts: s.startsIn(), began: time.Now()}
	p.bar = terminalBar(p.w, len(s.configs)*len(s.sweep.Levels))
	return p
}

// begin is told of the next config.
func (p *sweepProgress) begin(c *sweptConfig) { p.config = c }

// step is told what begins now.
func (p *sweepProgress) step(step string) {
	text := p.config.Name + ": " + step
	if p.bar != nil {
		p.bar.Describe(text)
		return
	}
	if time.Since(p.last) >= lineEvery { // a log needs a sign of life, not every step
		p.last = time.Now()
		p.line("%s%s", text, p.left())
	}
}

// probed is told of a measured load.
func (p *sweepProgress) probed(c *sweptConfig, probe trial.Probe) {
	p.count(1)
	if p.s.file.Server.Simulate == "" {
		p.line("%s at %s: %s, %s%s", c.Name, probe.Level(), verdictCell(probe), probe.Verdict.Reason, p.left())
	}
}

// ended is told that a config is through, or that its server failed.
func (p *sweepProgress) ended(c *sweptConfig) {
	p.count(len(p.s.sweep.Levels) - len(c.probes))
	if parts := c.result.Facts.StartUp; parts > 0 {
		p.starts = parts
	}
	p.line("%s", strings.TrimSuffix(wrapped(c.Name+": "+c.found(p.s.closed()), "  "), "\n"))
}

func (p *sweepProgress) count(loads int) {
	p.loads += loads
	if p.bar != nil {
		_ = p.bar.Add(loads) // a bar that cannot be drawn is no reason to stop
	}
}

// left is how long the rest takes, for a log: a bar has its own. What a closed loop takes is told by what it took.
func (p *sweepProgress) left() string {
	all := len(p.s.configs) * len(p.s.sweep.Levels)
	if p.bar != nil || p.s.file.Server.Simulate != "" || p.loads == all {
		return ""
	}
	left := p.planned()
	if p.s.closed() {
		if p.loads == 0 {
			return ""
		}
		left = time.Since(p.began) / time.Duration(p.loads) * time.Duration(all-p.loads)
	}
	return fmt.Sprintf(" (about %s left)", left.Round(time.Minute))
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

// line writes a line above the bar.
func (p *sweepProgress) line(format string, args ...any) {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
	fmt.Fprintf(p.w, format+"\n", args...)
}

// done removes the bar.
func (p *sweepProgress) done() error {
	if p.bar == nil {
		return nil
	}
	return p.bar.Clear()
}
