package calibrate

import (
	"context"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/simload"
)

// A replayer replays the probes of the chosen trials with one profile after the other.
type replayer struct {
	chosen   []*candidate
	runner   *trial.Runner
	rig      simload.Rig              // starts the runner's servers
	progress func(done, expected int) // may be nil
	replays  int                      // number of replays so far; each replays all probes
	planned  int                      // expected number of replays
}

// newReplayer makes the runner start simulated servers.
func newReplayer(runner *trial.Runner, chosen []*candidate, progress func(done, expected int)) *replayer {
	r := &replayer{chosen: chosen, runner: runner, progress: progress}
	runner.Start, runner.Source, runner.KnownCache = r.rig.Start, &Memo{Source: runner.Source}, true
	return r
}

// predict replays the probes with the profile p. It replays several trials at a time. If the server of a trial does not
// start, the trial's entry in errs says why, and the trial has no predicted probes.
func (r *replayer) predict(ctx context.Context, p *sim.Profile) (predicted [][]trial.Probe, errs []error, err error) {
	predicted, errs = make([][]trial.Probe, len(r.chosen)), make([]error, len(r.chosen))
	r.rig.Profile = p
	var workers errgroup.Group
	workers.SetLimit(runtime.GOMAXPROCS(0))
	for i, one := range r.chosen {
		workers.Go(func() error {
			task := trial.Task{Number: one.trial.Number, Args: one.args}
			for _, p := range one.probes {
				task.Done = append(task.Done, p.Probe)
			}
			predicted[i], errs[i] = r.runner.Replay(ctx, task)
			return nil // one trial's error does not stop the others
		})
	}
	_ = workers.Wait() // the error is always nil
	r.replays++
	if r.progress != nil {
		r.progress(r.replays, max(r.planned, r.replays+r.replays/10))
	}
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	return predicted, errs, nil
}

// A Memo keeps the requests of a source that makes a new request on each call. With a Memo, the content of a request is
// hashed only once.
type Memo struct {
	workload.Source
	mu   sync.Mutex
	kept map[key]*workload.Request
}

type key struct {
	stream workload.Stream
	i      int
}

// maxMemoized is the largest number of requests in a Memo. simload keeps the hashes of the same number of requests.
const maxMemoized = 4096

// Request returns the same request for the same arguments.
func (m *Memo) Request(stream workload.Stream, i int) *workload.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r, ok := m.kept[key{stream, i}]; ok {
		return r
	}
	if m.kept == nil || len(m.kept) >= maxMemoized {
		m.kept = make(map[key]*workload.Request)
	}
	r := m.Source.Request(stream, i)
	m.kept[key{stream, i}] = r
	return r
}
