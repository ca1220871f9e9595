package sampler

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/space/landscape"
)

// A surface knows the true capacity of each point of a space.
type surface struct {
	name   string
	space  *space.Space
	first  space.Point                       // the point of trial 0
	rate   func(space.Point) (float64, bool) // requests per second, and whether the server starts
	best   float64
	atMost float64 // highest allowed median regret of tpe at 3 % noise
}

// h200 returns a surface from a table of capacities of a simulated H200. Its best point is at the end of two ranges.
func h200(t testing.TB) surface {
	t.Helper()
	l, err := landscape.H200()
	if err != nil {
		t.Fatal(err)
	}
	s := spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.70, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 1024, Max: 32768, Log: true},
	}, "max-num-batched-tokens >= max-num-seqs")
	rate := func(p space.Point) (float64, bool) {
		at, err := l.At(p)
		if err != nil {
			t.Fatal(err)
		}
		return at, true
	}
	return surface{name: "H200", space: s, rate: rate, best: l.Best, atMost: 0.05, first: space.Point{}}
}

// inner returns a surface whose best point is inside the space, next to points that crash. The best value of one
// parameter depends on others.
func inner(t testing.TB) surface {
	t.Helper()
	s := spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.5, Max: 0.98, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 8, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 512, Max: 32768, Log: true},
		{Name: "num-speculative-tokens", Kind: space.Categorical, Choices: []string{"0", "1", "2", "3", "5"}},
	}, "max-num-batched-tokens >= max-num-seqs")
	gain := map[string]float64{"0": 1, "1": 1.12, "2": 1.2, "3": 1.15, "5": 0.95}
	rate := func(p space.Point) (float64, bool) {
		u, _ := s.Unit(p)
		hill := -2*square(u[0]-0.85) - 3*square(u[1]-0.55-0.3*(u[2]-0.5)) - 2*square(u[2]-0.4)
		return gain[p["num-speculative-tokens"]] * math.Exp(hill), u[0]+0.25*u[1]+0.2*u[2] <= 1.15
	}
	return surface{name: "inner", space: s, rate: rate, best: 1.2, atMost: 0.09, first: space.Point{
		"gpu-memory-utilization": "0.9", "max-num-seqs": "256", "max-num-batched-tokens": "2048", "num-speculative-tokens": "0"}}
}

// mixed returns a surface on which choices have the largest effect, and some parameters have none.
func mixed(t testing.TB) surface {
	t.Helper()
	s := mixedSpace(t)
	rate := func(p space.Point) (float64, bool) {
		u, _ := s.Unit(p)
		rate := math.Exp(-4*math.Abs(u[0]-0.9) - square(u[1]-0.4))
		if p["num-speculative-tokens"] == "3" {
			rate *= 1.5
		}
		if p["enable-prefix-caching"] == "true" {
			rate *= 1.3
		}
		return rate, u[0] <= 0.97
	}
	return surface{name: "mixed", space: s, rate: rate, best: 1.5 * 1.3, atMost: 0.2, first: space.Point{
		"gpu-memory-utilization": "0.9", "max-num-seqs": "256", "max-num-batched-tokens": "2048", "num-speculative-tokens": "0"}}
}

func square(x float64) float64 { return x * x }

func measuredTrial(number int, p space.Point, rate float64) studies.Trial {
	return studies.Trial{Number: number, Point: p, State: studies.Done, Result: trial.Result{
		Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact},
	}}
}

func crashedTrial(number int, p space.Point) studies.Trial {
	return studies.Trial{Number: number, Point: p, State: studies.Done, Result: trial.Result{
		Outcome: trial.Infeasible, Class: serverctl.OOMStart,
	}}
}

// regret runs a study of 30 trials with log-normal noise. It takes the point with the best measurement, and returns how
// far its true capacity is below the best of the surface: 0 is the best, 1 the worst.
func regret(t testing.TB, on surface, name string, seed uint64, noise float64) float64 {
	t.Helper()
	const trials = 30
	chooser := newSampler(t, name, on.space, seed, trials)
	rng := rand.New(rand.NewPCG(seed, 99))
	var history []studies.Trial
	best, lost := 0.0, 1.0
	for n := range trials {
		p := on.first
		if n > 0 {
			var err error
			if p, err = chooser.Next(n, history); errors.Is(err, ErrExhausted) {
				break
			} else if err != nil {
				t.Fatalf("%s, seed %d, trial %d: %v", name, seed, n, err)
			}
		}
		truth, lives := on.rate(p)
		measured := truth * math.Exp(noise*rng.NormFloat64())
		if !lives {
			history = append(history, crashedTrial(n, p))
			continue
		}
		history = append(history, measuredTrial(n, p, measured))
		if measured > best {
			best, lost = measured, 1-truth/on.best
		}
	}
	return lost
}

func TestRegret(t *testing.T) { regrets(t, 15, 0.03) }

// TestRegretAtTwoNoises repeats TestRegret with more seeds, and also with more noise.
func TestRegretAtTwoNoises(t *testing.T) {
	realtime.Only(t, "runs hundreds of studies")
	regrets(t, 30, 0.03, 0.08)
}

// regrets runs studies with several seeds, and compares the regret of the samplers.
func regrets(t *testing.T, seeds int, noises ...float64) {
	t.Helper()
	for _, on := range []surface{h200(t), inner(t), mixed(t)} {
		for _, noise := range noises {
			median := map[string]float64{}
			for _, name := range names {
				var all []float64
				for seed := range uint64(seeds) {
					all = append(all, regret(t, on, name, seed, noise))
				}
				slices.Sort(all)
				median[name] = all[seeds/2]
				t.Logf("%-5s %.0f %% noise: %-6s median regret %4.1f %%, 90 %% of seeds below %4.1f %%",
					on.name, 100*noise, name, 100*median[name], 100*all[seeds*9/10])
			}
			if noise == 0.03 && median["tpe"] > on.atMost {
				t.Errorf("%s: tpe's median regret is %.1f %%, want at most %.0f %%", on.name, 100*median["tpe"], 100*on.atMost)
			}
			if median["tpe"] > median["random"]-0.01 {
				t.Errorf("%s, %.0f %% noise: tpe's median regret is %.1f %%, want clearly less than random's %.1f %%",
					on.name, 100*noise, 100*median["tpe"], 100*median["random"])
			}
		}
	}
}
