package sweep

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

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
