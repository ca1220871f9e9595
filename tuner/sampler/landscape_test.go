package sampler

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/space/landscape"
)

func h200(t testing.TB) *landscape.Landscape {
	t.Helper()
	l, err := landscape.H200()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func h200Space(t testing.TB) *space.Space {
	t.Helper()
	s, err := space.New([]space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.70, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 1024, Max: 32768, Log: true},
	}, []string{"max-num-batched-tokens >= max-num-seqs"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func measuredTrial(number int, p space.Point, rate float64) studies.Trial {
	return studies.Trial{Number: number, Point: p, State: studies.Done, Result: trial.Result{
		Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact},
	}}
}

// regret runs a study on the landscape with log-normal noise and returns how far the winner is below the best, 0 to 1.
func regret(t testing.TB, l *landscape.Landscape, name string, seed uint64, trials int, noise float64) float64 {
	t.Helper()
	s := h200Space(t)
	chooser, err := New(name, s, seed, trials)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(seed, 99))
	var history []studies.Trial
	best, winner := 0.0, space.Point(nil)
	for n := range trials {
		p := space.Point{}
		if n > 0 {
			if p, err = chooser.Next(n, history); errors.Is(err, ErrExhausted) {
				break
			} else if err != nil {
				t.Fatalf("%s, seed %d, trial %d: %v", name, seed, n, err)
			}
		}
		at, err := l.At(p)
		if err != nil {
			t.Fatal(err)
		}
		rate := at * math.Exp(noise*rng.NormFloat64())
		history = append(history, measuredTrial(n, p, rate))
		if rate > best {
			best, winner = rate, p
		}
	}
	r, err := l.Regret(winner)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Thirty-trial studies on the simulated H200's table of capacities, over seeds and at two noises.
func TestRegretOnTheH200Landscape(t *testing.T) {
	l := h200(t)
	const seeds = 60
	quantile := func(name string, noise, p float64) float64 {
		var all []float64
		for seed := range uint64(seeds) {
			all = append(all, regret(t, l, name, seed, 30, noise))
		}
		slices.Sort(all)
		return all[int(p*(seeds-1))]
	}
	for _, noise := range []float64{0.03, 0.08} {
		median := map[string]float64{}
		for _, name := range Names {
			median[name] = quantile(name, noise, 0.5)
			t.Logf("noise %.0f %%: %-6s median regret %.1f %%, 90 %% of seeds below %.1f %%", 100*noise, name, 100*median[name], 100*quantile(name, noise, 0.9))
		}
		if limit := 0.04 + noise; median["tpe"] > limit || median["tpe"] > median["random"]+0.005 {
			t.Errorf("noise %.0f %%: tpe's median regret is %.1f %%, want at most %.0f %% and no more than random's %.1f %%",
				100*noise, 100*median["tpe"], 100*limit, 100*median["random"])
		}
	}
}
