package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl/weights"
	"vllmtuner/studies"
)

// say is told what is well. Under the word warning it is told what is not as it should be.
type say func(what, format string, args ...any)

// A need is something without which no server is started. It returns why not.
type need func(p *plan, ctx context.Context, say say) error

// needs are all of them, in the order in which they are told. `check` and `run` both go through this list, so that what the one refuses the
// other refuses too. The server's flags are beside it: run asks for them only once, and a wrapper that cannot tell them is no refusal.
var needs = []need{
	(*plan).checkMachine,
	(*plan).checkWeights,
	(*plan).checkRequests,
}

// checkNeeds returns the first need that is not met.
func (p *plan) checkNeeds(ctx context.Context, say say) error {
	for _, check := range needs {
		if err := check(p, ctx, say); err != nil {
			return err
		}
	}
	return nil
}

// checkWeights finds a model's directory without weights. A model that is not on this machine is downloaded by the server.
func (p *plan) checkWeights(_ context.Context, say say) error {
	if p.file.Server.Simulate != "" || p.isDummy() {
		return nil
	}
	files, where, err := p.weightFiles()
	switch {
	case errors.Is(err, weights.ErrUnknown):
		say("model", "%s is not on this machine: the server downloads it", p.file.Model)
		return nil
	case err != nil:
		return err
	}
	if to := p.file.Server.ModelCopy; to != "" {
		if err := weights.CheckCopy(where, to); err != nil {
			return usageError{fmt.Errorf("%s: server.model_copy: %w", p.file.Path, err)}
		}
	}
	say("model", "%s of weights in %s", render.Count(len(files), "file"), where)
	return nil
}

// checkRequests finds a workload that is too small for a probe.
func (p *plan) checkRequests(_ context.Context, say say) error {
	if n, first := workload.Skipped(p.source); n > 0 {
		say("bad rows", "%d are left out, the first: %v", n, first)
	}
	need := p.requests()
	if err := workload.Enough(p.source, need); err != nil {
		return usageError{fmt.Errorf("%s: workload: %w", p.file.Path, err)}
	}
	if workload.Repeats(p.source, need) > 0 {
		say("repeats", "the workload's %d requests are fewer than a probe's %d: they repeat, and hit the cache (repeat: salt makes them miss it)", p.source.Len(), need)
	}
	return nil
}

// checkStudy finds a study that cannot be begun, or gone on with, in a directory: what opening it would refuse, as far as a reader can tell.
func checkStudy(ctx context.Context, dir string, begun studies.New) (studies.Disk, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, storePatience, silentDiskError(dir))
	defer cancel()
	return answered(ctx, func() (studies.Disk, error) {
		if err := cmp.Or(checkPlace(dir), checkRecord(dir)); err != nil {
			return studies.Disk{}, err
		}
		disk, err := studies.CheckOpen(dir, begun)
		if err != nil {
			return disk, err
		}
		life, err := studies.LifeOf(ctx, dir)
		if err == nil && life.Alive {
			err = fmt.Errorf("%w: %s", studies.ErrOwned, life.Owner)
		}
		return disk, err
	})
}
