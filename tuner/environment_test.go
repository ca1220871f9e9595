package tuner

import (
	"context"
	"errors"
	"maps"
	"testing"

	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// Every server gets the variables of its trial's point. This includes the second server of a trial that a kill left
// half done. No variable becomes an arg.
func TestEachServerGetsTheVariablesOfItsPoint(t *testing.T) {
	store := open(t, t.TempDir())
	var seen []trial.Launch
	make := func(store Store) *Study {
		s := study(t, store, trial.Primed, 4)
		var err error
		parameters := append(s.Space.Parameters(), space.Parameter{Name: "VLLM_BACKEND", Kind: space.Categorical, Choices: []string{"A", "B"}})
		if s.Space, err = space.New(parameters, nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		if s.Sampler, err = sampler.New("random", s.Space, 1, 4); err != nil {
			t.Fatal(err)
		}
		start := s.Runner.Start
		s.Runner.Start = func(ctx context.Context, l trial.Launch) (trial.Server, trial.Load, error) {
			seen = append(seen, l)
			return start(ctx, l)
		}
		return coarse(s)
	}
	if _, err := make(killedAfter(store, "record", 2)).Run(t.Context()); !errors.Is(err, errKilled) {
		t.Fatalf("Run = %v, want it killed", err)
	}
	mustRun(t, make(store))
	trials := stored(t, store).Trials
	if len(seen) != 5 { // trial 2 had two servers
		t.Fatalf("%d servers started, want 5", len(seen))
	}
	for _, l := range seen {
		point := trials[l.Number].Point
		if !maps.Equal(l.Env, point.Env()) || l.Number >= 2 && l.Env["VLLM_BACKEND"] == "" || l.Number < 2 && l.Env != nil {
			t.Errorf("the server of trial %d has the variables %v, and its point is %s", l.Number, l.Env, point)
		}
	}
}
