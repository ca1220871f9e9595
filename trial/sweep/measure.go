package sweep

import (
	"context"
	"fmt"
	"io"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial"
)

// Measure measures the configs one after the other, and writes progress to w. If it returns an error, s keeps the
// results so far. When the channel finish is closed, Measure ends after the current load.
func (s *Sweep) Measure(ctx context.Context, runner *trial.Runner, finish <-chan struct{}, w io.Writer) error {
	progress := newProgress(s, w)
	defer progress.shown.End()
	for _, c := range s.Configs {
		select {
		case <-finish:
			return trial.ErrInterrupted
		default:
		}
		if err := s.measureConfig(ctx, runner, c, finish, progress); err != nil {
			return fmt.Errorf("config %s: %w", c.Name, err)
		}
	}
	return nil
}

// measureConfig starts a server for one config and measures all loads on it.
func (s *Sweep) measureConfig(ctx context.Context, runner *trial.Runner, c *Config, finish <-chan struct{}, progress *progress) error {
	s.begun++
	var err error
	c.Result, err = runner.Sweep(ctx, trial.Task{
		Number: c.Number, Args: c.Args,
		Record: func(p trial.Probe) error {
			c.Probes = append(c.Probes, p)
			progress.probed(c, p)
			return nil
		},
		Progress: progress.step, Finish: finish,
	}, s.Plan)
	if err == nil {
		progress.ended(c)
	}
	return err
}

// A progress shows how far a sweep is. It writes a line for each measured load and each config. In virtual time it
// writes only a line for each config.
type progress struct {
	*Sweep
	loads
	shown  *render.Progress
	starts time.Duration // how long a server takes to start
	began  time.Time
}

func newProgress(s *Sweep, w io.Writer) *progress {
	return &progress{Sweep: s, loads: s.loads(), shown: render.NewProgress(w), starts: s.StartUp, began: time.Now()}
}

// config returns the config that is measured now.
func (p *progress) config() *Config { return p.Configs[p.begun-1] }

// count returns how many loads are done, and how many there are. The loads that a failed server left out count as done.
func (p *progress) count() (done, all int) {
	each := len(p.Plan.Levels)
	return (p.begun-1)*each + len(p.config().Probes), len(p.Configs) * each
}

// step shows the name of the step that begins now.
func (p *progress) step(step string) {
	done, all := p.count()
	p.shown.Show(render.Stage{
		Head: render.Done(done, all, "load"), Share: float64(done) / float64(max(1, all)), Until: render.After(p.left()),
		Step: p.config().Name + ", " + step,
	})
}

// margin is how many columns the second and later lines of a message are indented.
const margin = 2

// probed writes a line about a measured load.
func (p *progress) probed(c *Config, probe trial.Probe) {
	if p.Simulated != "" {
		return
	}
	left := render.Left(p.left())
	if left != "" {
		left = " (" + left + ")"
	}
	p.shown.Line(margin, "%s at %s: %s, %s%s", c.Name, probe.Level(), verdictCell(c, probe), probe.Verdict.Reason, left)
}

// ended writes a line about a config after its last load, or after its server failed.
func (p *progress) ended(c *Config) {
	if took := c.Result.Facts.StartUp; took > 0 {
		p.starts = took
	}
	p.shown.Line(margin, "%s: %s", c.Name, c.found(p.closed()))
}

// left returns the remaining time, or 0 if it is not known. For a closed loop it estimates the time from the loads so
// far.
func (p *progress) left() time.Duration {
	done, all := p.count()
	switch {
	case p.Simulated != "" || done == all || p.closed() && done == 0:
		return 0
	case p.closed():
		return time.Since(p.began) / time.Duration(done) * time.Duration(all-done)
	}
	// This assumes that the servers keep up with every rate.
	left := time.Duration(len(p.Configs)-p.begun) * (p.starts + p.Plan.Planned())
	for _, level := range p.Plan.Levels[len(p.config().Probes):] {
		left += p.Plan.Cooldown + p.Plan.Takes(level)
	}
	return left
}
