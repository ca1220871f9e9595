package trial

import (
	"context"
	"errors"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// Replay measures the probes of a task once more, as its Done has them: the same rates in the same order on one server, warmed
// up and primed as Run does it. It searches nothing and records nothing. A probe that had ended early ends after the same time,
// all others are carried through, whatever the SLO says of them now. The server is gone when Replay returns.
func (r *Runner) Replay(ctx context.Context, task Task) (probes []Probe, err error) {
	server, load, err := r.startServer(ctx, task)
	if err != nil {
		return nil, err
	}
	defer func() {
		_, stopErr := server.Stop(ctx)
		err = errors.Join(err, stopErr)
	}()
	again := &repeated{Load: load}
	m := &measuring{Runner: r, Task: task, server: server, load: again, firstRate: r.firstRate(server.Facts())}
	m.result.Facts = server.Facts()
	if err := m.warmUp(ctx); err != nil {
		return nil, m.cause(ctx, err)
	}
	for _, was := range task.Done { // not all of a trial, perhaps: each has the draw of its own number
		again.until = 0
		if was.Stopped {
			again.until = was.GPUTime - was.Replaced
		}
		p, err := m.measureRate(ctx, was.Seq, was.Rate, was.Replaced > 0)
		if err != nil {
			return nil, m.cause(ctx, err)
		}
		probes = append(probes, p)
	}
	return probes, nil
}

// A repeated load ends its probes when they had ended before.
type repeated struct {
	Load
	until time.Duration // of the probe at hand; 0 means its own end
}

// Run replaces the stop of a probe. A pass without one is not touched.
func (r *repeated) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	if stop != nil {
		stop = nil
		if until := r.until; until > 0 {
			stop = func(now time.Duration, _ []bench.Sample) bool { return now >= until }
		}
	}
	return r.Load.Run(ctx, schedule, stop)
}
