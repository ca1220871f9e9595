package tuner

import (
	"context"
	"math"
	"slices"
	"strings"
	"testing"

	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/simload"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

const tpFlag = "tensor-parallel-size"

// onGPUs starts simulated servers that are faster on more GPUs. A server on n GPUs is n^exponent times as fast as on
// one. The simulator itself knows nothing of the number of GPUs.
func onGPUs(t *testing.T, exponent float64) trial.Start {
	t.Helper()
	profile, err := sim.LoadProfile("small-fast")
	if err != nil {
		t.Fatal(err)
	}
	return func(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
		fast, speed := *profile, math.Pow(float64(serverctl.GPUCount(launch.Args)), exponent)
		for _, cost := range []*float64{
			&fast.Step.Fixed, &fast.Step.Weights, &fast.Step.PerToken, &fast.Step.PerSequence, &fast.Step.PerKVToken, &fast.Step.PerAttentionPair, &fast.Step.PrefillExtra,
		} {
			*cost /= speed
		}
		if i := slices.Index(launch.Args, "--"+tpFlag); i >= 0 {
			launch.Args = slices.Delete(slices.Clone(launch.Args), i, i+2)
		}
		return (&simload.Rig{Profile: &fast}).Start(ctx, launch)
	}
}

// openFor opens the store of a study with an objective.
func openFor(t *testing.T, dir string, o studies.Objective) *studies.Store {
	t.Helper()
	world := map[string]string{"model": "m"}
	if o != studies.TotalCapacity {
		world[studies.ObjectiveKey] = string(o)
	}
	store, _, err := studies.Open(t.Context(), dir, studies.New{Name: "small", Seed: 1, World: world}, studies.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { store.Close() })
	return store
}

// searchingGPUs returns a study that searches the number of GPUs. The user's server has two.
func searchingGPUs(t *testing.T, store Store, samplerName string, trials int) *Study {
	t.Helper()
	s := racing(t, store, trials)
	var err error
	s.Space, err = space.New([]space.Parameter{
		{Name: tpFlag, Kind: space.Categorical, Choices: []string{"1", "2", "4"}},
		{Name: "max-num-seqs", Kind: space.Int, Min: 24, Max: 64, Log: true},
	}, nil, nil, nil)
	if err == nil {
		s.Sampler, err = sampler.New(samplerName, s.Space, 1, trials)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.Presets, s.Current, s.Runner.Start = false, space.Point{tpFlag: "2"}, onGPUs(t, 0.5)
	s.Runner.Search.Max = 2000
	return s
}

// The objective decides which number of GPUs wins. A trial races against the best capacity, converted to the trial's
// number of GPUs.
func TestTheObjectiveDecidesTheNumberOfGPUs(t *testing.T) {
	realtime.Only(t, "measures two studies of nine trials")
	for objective, want := range map[studies.Objective]int{studies.TotalCapacity: 4, studies.CapacityPerGPU: 1} {
		t.Run(string(objective), func(t *testing.T) {
			store := openFor(t, t.TempDir(), objective)
			s := searchingGPUs(t, store, "gp", 9)
			mustRun(t, s)
			all := stored(t, store)
			best, found := Incumbent(all)
			if !found || best.GPUs() != want {
				t.Errorf("the best of the search has %d GPUs, want %d", best.GPUs(), want)
			}
			if confirmed, found := bestConfirmation(all, ""); !found || confirmed.GPUs() != want {
				t.Errorf("the best confirmation has %d GPUs, want %d", confirmed.GPUs(), want)
			}
			counts := map[int]int{}
			for i, one := range all.Trials {
				counts[one.GPUs()]++
				before := all
				before.Trials = all.Trials[:i]
				rival, found := Incumbent(before)
				if one.Origin == studies.Confirmed || !found {
					continue
				}
				first := 1.05 * rival.Result.Capacity.Carried() * objective.Factor(one) / objective.Factor(rival)
				if got := one.Probes[0].Rate; math.Abs(got/first-1) > 0.01 {
					t.Errorf("trial %d with %d GPUs begins at %g req/s, want %.4g", i, one.GPUs(), got, first)
				}
				if c := one.Result.Capacity; one.GPUs() != rival.GPUs() && strings.Contains(c.Why, "the race") &&
					strings.Contains(c.Why, "for as many GPUs") != (objective == studies.CapacityPerGPU) {
					t.Errorf("trial %d: %s", i, c.Why)
				}
			}
			if len(counts) != 3 {
				t.Errorf("the study measured servers with these numbers of GPUs: %v, want 1, 2 and 4", counts)
			}
		})
	}
}

// A trial that raced against a server with another number of GPUs gets the capacity of its own server.
func TestARaceBetweenNumbersOfGPUsIsRight(t *testing.T) {
	realtime.Only(t, "measures eight trials twice")
	store := openFor(t, t.TempDir(), studies.CapacityPerGPU)
	raced := searchingGPUs(t, store, "random", 8)
	raced.Runner.Start = onGPUs(t, 0.75) // with less, servers with many GPUs lose so clearly that they get no capacity
	mustRun(t, raced)
	full := openFor(t, t.TempDir(), studies.CapacityPerGPU)
	s := searchingGPUs(t, full, "random", 8)
	s.Budget.MinGain, s.Confirm, s.Runner.Start = 0, 0, raced.Runner.Start // without races
	mustRun(t, s)
	compared := 0
	for i, one := range stored(t, full).Trials {
		raced := stored(t, store).Trials[i]
		if raced.Point.String() != one.Point.String() {
			t.Fatalf("trial %d is %v, and without races %v", i, raced.Point, one.Point)
		}
		is, want := raced.Result.Capacity, one.Result.Capacity
		if !is.Known() || !want.Known() {
			continue
		}
		compared++
		if off := math.Abs(math.Log(is.Rate / want.Rate)); off > 4*math.Hypot(is.StdErr, want.StdErr)+0.05 {
			t.Errorf("trial %d with %d GPUs carries %.4g req/s by its race, and %.4g in full", i, one.GPUs(), is.Rate, want.Rate)
		}
	}
	if compared < 5 {
		t.Errorf("only %d trials have a capacity by both ways", compared)
	}
}

// If the objective is per GPU, the history for the sampler, the hint and the rival are per GPU too. Predictions do not
// change.
func TestCapacitiesAreJudgedByTheObjective(t *testing.T) {
	of := func(number int, gpus string, rate float64) studies.Trial {
		return studies.Trial{Number: number, State: studies.Done, Point: space.Point{tpFlag: gpus}, Args: []string{"--" + tpFlag, gpus}, Result: trial.Result{
			Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, High: rate, StdErr: 0.1, Bound: capacity.Exact},
		}}
	}
	predicted := of(-1, "4", 8)
	predicted.PredictedFor = 1
	elsewhere := of(-1, "2", 60)
	elsewhere.Source = "old.db"
	challenger := of(3, "4", 0)
	for _, row := range []struct {
		objective  studies.Objective
		best       int
		rates      []float64 // predicted, from elsewhere, and the study's own
		hint, race float64
		paired     bool
	}{
		{studies.TotalCapacity, 1, []float64{4, 4, 3, 4}, 4, 4, true},
		{studies.CapacityPerGPU, 0, []float64{3, 3, 3, 2}, 12, 12, false},
	} {
		study := studies.Study{
			World: map[string]string{studies.ObjectiveKey: string(row.objective)}, Prior: []studies.Trial{predicted, elsewhere},
			Trials: []studies.Trial{of(0, "1", 3), of(1, "2", 4)},
		}
		study.Trials[0].Probes, study.Trials[1].Probes = []trial.Probe{{}}, []trial.Probe{{}}
		study.Trials[1].Point["max-num-seqs"] = "64" // no prior has this point
		var rates []float64
		for _, one := range history(study) {
			rates = append(rates, one.Result.Capacity.Rate)
		}
		if !slices.Equal(rates, row.rates) {
			t.Errorf("%s: the sampler learns from %v, want %v", row.objective, rates, row.rates)
		}
		if best, _ := Incumbent(study); best.Number != row.best {
			t.Errorf("%s: the incumbent is trial %d, want %d", row.objective, best.Number, row.best)
		}
		if got := hint(study, &challenger); got != row.hint {
			t.Errorf("%s: the hint is %g, want %g", row.objective, got, row.hint)
		}
		rival := toBeat(study, &challenger)
		if c := rival.Capacity; c.Carried() != row.race || c.StdErr != 0.1 || (len(rival.Probes) > 0) != row.paired {
			t.Errorf("%s: the rival is %+v with %d probes; want %g req/s, paired %v", row.objective, c, len(rival.Probes), row.race, row.paired)
		}
		if study.Trials[1].Result.Capacity.Rate != 4 {
			t.Errorf("%s: the study itself has changed", row.objective)
		}
	}
}
