package sweep

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
)

// Measure measures the configs one after the other, and writes progress to w. Its results stand, whatever error it returns. When
// finish is closed, it ends after the current load.
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

// measureConfig measures one config on a server of its own.
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

// ErrNoConfigKept is the outcome when no config kept the SLO with the load generator in time.
var ErrNoConfigKept = errors.New("no config kept the SLO at any load")

// Outcome is the error of a sweep that was measured to its end: nil if a config kept the SLO.
func (s *Sweep) Outcome() error {
	c := s.compare()
	switch {
	case !s.measuredAny():
		return errors.New("no config could be measured; the table says why")
	case len(c.best) > 0:
		return nil
	case slices.ContainsFunc(c.all, func(st standing) bool { return st.Limited != "" }):
		return fmt.Errorf("%w in time: the load generator was late; %s", ErrNoConfigKept, loadtest.MoreCores)
	}
	return ErrNoConfigKept
}

// A progress shows how far a sweep is. Each measured load gets a line. In virtual time a line for each config is enough.
type progress struct {
	*Sweep
	shown  *render.Progress
	starts time.Duration // how long a server takes to start
	began  time.Time
}

func newProgress(s *Sweep, w io.Writer) *progress {
	return &progress{Sweep: s, shown: render.NewProgress(w), starts: s.StartUp, began: time.Now()}
}

// config is the config that is being measured.
func (p *progress) config() *Config { return p.Configs[p.begun-1] }

// loads is how many loads were measured, or given up with an earlier server; all is how many there are.
func (p *progress) loads() (done, all int) {
	each := len(p.Plan.Levels)
	return (p.begun-1)*each + len(p.config().Probes), len(p.Configs) * each
}

// step shows what begins now.
func (p *progress) step(step string) {
	done, all := p.loads()
	p.shown.Show(render.Stage{
		Head: render.Done(done, all, "load"), Share: float64(done) / float64(max(1, all)), Until: render.After(p.left()),
		Step: p.config().Name + ", " + step,
	})
}

// margin is the indent of the second line of a message, in columns.
const margin = 2

// probed reports a measured load.
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

// ended reports a config that is measured, or whose server failed.
func (p *progress) ended(c *Config) {
	if took := c.Result.Facts.StartUp; took > 0 {
		p.starts = took
	}
	p.shown.Line(margin, "%s: %s", c.Name, c.found(p.closed()))
}

// left is the remaining time; 0 where it is not known. In a closed loop it is estimated from the time so far.
func (p *progress) left() time.Duration {
	done, all := p.loads()
	switch {
	case p.Simulated != "" || done == all || p.closed() && done == 0:
		return 0
	case p.closed():
		return time.Since(p.began) / time.Duration(done) * time.Duration(all-done)
	}
	// The servers keep up with their rates.
	left := time.Duration(len(p.Configs)-p.begun) * (p.starts + p.Plan.Planned())
	for _, level := range p.Plan.Levels[len(p.config().Probes):] {
		left += p.Plan.Cooldown + p.Plan.Takes(level)
	}
	return left
}
