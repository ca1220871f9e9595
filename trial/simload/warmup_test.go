package simload

import (
	"context"
	"errors"
	"strings"
	"testing"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

var errProbe = errors.New("the first probe begins")

// A warmUpLoad counts the requests of a warm-up and ends the trial at the first probe.
type warmUpLoad struct {
	trial.Load
	requests int
}

func (w *warmUpLoad) Run(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	if stop != nil { // only probes can be stopped
		return bench.Run{}, errProbe
	}
	run, err := w.Load.Run(ctx, schedule, stop)
	w.requests += run.Others + len(run.Samples)
	return run, err
}

// warmUpRequests returns how many requests a trial sends to warm up a simulated server, which is warm from its start.
func warmUpRequests(t *testing.T, kind string, seed uint64, rate float64) int {
	t.Helper()
	rig, w := &Rig{Profile: profile(t, "h200-llama70b-fp8")}, &warmUpLoad{}
	r := &trial.Runner{
		Source: source(t, workload.Spec{Kind: kind}, seed), Cache: trial.Reset, Seed: seed, PrimeRate: rate, SLO: slo.SLO{MaxErrorRate: 0.5},
		Lengths: trial.Lengths{MinRequests: 10}, Search: capacity.Search{Hint: rate, Min: 0.1, Max: 10, Factor: 2, Tolerance: 1, MaxProbes: 1},
		Start: func(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
			server, load, err := rig.Start(ctx, launch)
			w.Load = load
			return server, w, err
		},
	}
	_, err := r.Run(t.Context(), trial.Task{Args: strings.Fields("--max-model-len 16384")})
	if !errors.Is(err, errProbe) {
		t.Fatal(err)
	}
	return w.requests
}

// The warm-up is short for a server that is warm from its start, whichever requests come first.
func TestAWarmServerIsNotWarmedForLong(t *testing.T) {
	for _, kind := range []string{"production", "phase1"} {
		draws := 100
		if realtime.RaceDetector {
			draws = 2
		}
		twenty, longest := 0, 0
		for seed := range uint64(draws) {
			n := warmUpRequests(t, kind, seed, 2)
			if n == 20 {
				twenty++
			}
			longest = max(longest, n)
		}
		t.Logf("%s: %d of %d draws take 20 requests, the longest %d", kind, twenty, draws, longest)
		if 10*twenty < 8*draws || longest > 50 {
			t.Errorf("%s: the warm-up takes 20 requests in %d of %d draws, and %d in the longest; want 20 in at least four fifths, and at most 50", kind, twenty, draws, longest)
		}
	}
}
