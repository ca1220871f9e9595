package sweep

import (
	"io"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial"
)

// A progress shows how far a sweep is. Each measured load gets a line. In virtual time a line for each config is enough.
type progress struct {
	s      *Sweep
	shown  *render.Progress
	config *Config       // the config that is being measured
	starts time.Duration // how long a server takes to start
	began  time.Time
	loads  int // measured, or given up
}

func newProgress(s *Sweep, w io.Writer) *progress {
	return &progress{s: s, shown: render.NewProgress(w), starts: s.StartUp, began: time.Now()}
}

// all is how many loads there are.
func (p *progress) all() int { return len(p.s.Configs) * len(p.s.Plan.Levels) }

// step shows what begins now.
func (p *progress) step(step string) {
	p.shown.Show(render.Stage{
		Head: render.Done(p.loads, p.all(), "load"), Share: float64(p.loads) / float64(max(1, p.all())), Until: render.After(p.left()),
		Step: p.config.Name + ", " + step,
	})
}

// line writes a line that stays. Its continuation is indented by two columns.
func (p *progress) line(format string, args ...any) { p.shown.Line(2, format, args...) }

// probed reports a measured load.
func (p *progress) probed(c *Config, probe trial.Probe) {
	p.loads++
	if p.s.Simulated != "" {
		return
	}
	left := render.Left(p.left())
	if left != "" {
		left = " (" + left + ")"
	}
	p.line("%s at %s: %s, %s%s", c.Name, probe.Level(), verdictCell(probe), probe.Verdict.Reason, left)
}

// ended reports a config that is measured, or whose server failed.
func (p *progress) ended(c *Config) {
	p.loads += len(p.s.Plan.Levels) - len(c.Probes)
	if took := c.Result.Facts.StartUp; took > 0 {
		p.starts = took
	}
	p.line("%s: %s", c.Name, c.found(p.s.closed()))
}

// left is the remaining time; 0 where it is not known. In a closed loop it is estimated from the time so far.
func (p *progress) left() time.Duration {
	switch {
	case p.s.Simulated != "" || p.loads == p.all() || p.s.closed() && p.loads == 0:
		return 0
	case p.s.closed():
		return time.Since(p.began) / time.Duration(p.loads) * time.Duration(p.all()-p.loads)
	}
	return p.planned()
}

// planned is how long the remaining loads take on servers that keep up with them.
func (p *progress) planned() time.Duration {
	left := time.Duration(0)
	for i := range p.s.Configs {
		switch c := &p.s.Configs[i]; {
		case c.done:
		case !c.begun:
			left += p.starts + p.s.Plan.Planned()
		default:
			for _, level := range p.s.Plan.Levels[len(c.Probes):] {
				left += p.s.Plan.Cooldown + p.s.Plan.Takes(level)
			}
		}
	}
	return left
}
