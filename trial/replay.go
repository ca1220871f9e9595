package trial

import (
	"context"
	"errors"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// Replay measures the probes in the task's Done again: the same rates in the same order on one server, warmed up and
// primed as Run does it. It searches nothing and records nothing. A probe that had ended early ends after the same
// time. All others run to their end, whatever the SLO says of them now. The server is gone when Replay returns.
func (r *Runner) Replay(ctx context.Context, task Task) (probes []Probe, err error) {
	server, load, err := r.startServer(ctx, task)
	if err != nil {
		return nil, err
	}
	defer func() {
		_, stopErr := server.Stop(ctx)
		err = errors.Join(err, stopErr)
	}()
	replayed := &replayedLoad{Load: load}
	t := newSearchRun(newSession(r, task, server, replayed))
	if err := t.warmUp(ctx); err != nil {
		return nil, explain(ctx, server, err)
	}
	for _, was := range task.Done { // it may be a part of a trial: each probe has the draw of its own number
		replayed.until = 0
		if was.Stopped {
			replayed.until = was.GPUTime - was.Replaced
		}
		p, err := t.probeOf(ctx, was.Seq, was.Rate, was.Replaced > 0)
		if err != nil {
			return nil, explain(ctx, server, err)
		}
		probes = append(probes, p)
	}
	return probes, nil
}

// A replayedLoad ends each probe where it ended before.
type replayedLoad struct {
	Load
	until time.Duration // of the current probe; 0 means its own end
}

// Run replaces the stop of a probe. A load without a stop stays as it is.
func (r *replayedLoad) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	if stop != nil {
		stop = nil
		if until := r.until; until > 0 {
			stop = func(now time.Duration, _ []bench.Sample) bool { return now >= until }
		}
	}
	return r.Load.Run(ctx, schedule, stop)
}
