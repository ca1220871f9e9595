package trial

import (
	"context"
	"errors"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// Replay repeats the probes in task.Done. It probes the same rates in the same order on one server, which is warmed up
// and primed as in Run. It searches nothing and records nothing. A probe that ended early ends after the same time in
// the replay. All other probes run to their end, even if they break the SLO now. The server is gone when Replay
// returns.
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
	t := newSearchRun(newSession(r, task, server, replayed, NewBooks(r.Simulated)))
	if err := t.warmUp(ctx); err != nil {
		return nil, explain(ctx, server, err)
	}
	for _, was := range task.Done { // Done may be only a part of a trial, so the number of each probe, not its place in Done, chooses its draw
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

// A replayedLoad ends each probe after the same time as in the original trial.
type replayedLoad struct {
	Load
	until time.Duration // when to end the current probe; 0 means at its planned end
}

// Run replaces the Stop of a probe by one that ends the probe after r.until. It does not change a load without a Stop,
// such as the warm-up.
func (r *replayedLoad) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	if stop != nil {
		stop = nil
		if until := r.until; until > 0 {
			stop = func(now time.Duration, _ []bench.Sample) bool { return now >= until }
		}
	}
	return r.Load.Run(ctx, schedule, stop)
}
