package sampler

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
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

// A surface gives the true capacity of each point of a space.
type surface struct {
	name   string
	space  *space.Space
	first  space.Point                       // the point of trial 0
	rate   func(space.Point) (float64, bool) // requests per second, and whether the server starts
	best   float64
	atMost float64 // highest allowed median regret of tpe at 3 % noise; 0 means that the regrets are only logged
}

// h200 is the table of capacities of a simulated H200. Its best point lies at the end of two ranges.
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
		at, err := l.Capacity(p)
		if err != nil {
			t.Fatal(err)
		}
		return at, true
	}
	return surface{name: "H200", space: s, rate: rate, best: l.Best, atMost: 0.05, first: space.Point{}}
}

// inner is a surface whose best point lies inside the space, next to a region of crashes. Its numbers depend on each
// other.
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

// mixed is a surface in which choices matter most, and some parameters do not matter at all.
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

// ridge is a surface of interacting flags. A fifth of the space crashes, and the best point lies at the edge of that
// region. It follows problem A of the comparison by which this sampler was chosen.
func ridge(t testing.TB) surface {
	t.Helper()
	s := fourFlags(t)
	rate := func(p space.Point) (float64, bool) {
		u, k := unitAndTokens(t, s, p)
		hill := math.Exp(-3*square(u[1]-0.2-0.6*u[0]) - 2*square(u[2]-0.25-0.4*u[1]))
		drafts := 1 + 0.5*k/2*math.Exp(1-k/2)*(1.1-u[1])
		return (0.4 + 0.6*u[0]) * hill * drafts, u[0]+0.3*u[1]+0.25*u[2] <= 1.04
	}
	return surface{name: "ridge", space: s, rate: rate, best: highestOf(s, rate), first: vllmDefaults}
}

// peaks is a surface with two narrow peaks, and a larger region of crashes next to the higher one. It follows problem B
// of the comparison by which this sampler was chosen.
func peaks(t testing.TB) surface {
	t.Helper()
	s := fourFlags(t)
	rate := func(p space.Point) (float64, bool) {
		u, k := unitAndTokens(t, s, p)
		peak := func(a, b, c, d, width float64) float64 {
			return math.Exp(-(square(u[0]-a) + square(u[1]-b) + square(u[2]-c) + square(k/5-d)/2) / (2 * width * width))
		}
		return 0.15 + peak(0.62, 0.7, 0.35, 0.6, 0.16) + 0.75*peak(0.3, 0.25, 0.7, 0, 0.2), u[0]+0.3*u[1]+0.25*u[2] <= 1
	}
	return surface{name: "peaks", space: s, rate: rate, best: highestOf(s, rate), first: vllmDefaults}
}

// speculative is a surface of eight flags. Two of them are active under conditions only, three have no order, and 0
// tokens are another way to decode.
func speculative(t testing.TB) surface {
	t.Helper()
	s := spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.7, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 1024, Max: 32768, Log: true},
		{Name: "num-speculative-tokens", Kind: space.Int, Min: 0, Max: 5},
		{Name: "prompt-lookup-max", Kind: space.Int, Min: 2, Max: 9, When: "num-speculative-tokens > 0"},
		{Name: "enable-prefix-caching", Kind: space.Bool},
		{Name: "attention-backend", Kind: space.Categorical, Choices: []string{"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}},
		{Name: "long-prefill-token-threshold", Kind: space.Int, Min: 0, Max: 4096, Step: 512, When: "max-num-batched-tokens > 4096"},
	}, "max-num-batched-tokens >= max-num-seqs")
	rate := func(p space.Point) (float64, bool) {
		u, k := unitAndTokens(t, s, p)
		rate := (0.5 + 0.5*u[0]) * math.Exp(-square(u[1]-0.6)-1.5*square(u[2]-0.45))
		if k > 0 {
			rate *= 0.8 + 0.5*k/3*math.Exp(1-k/3)*math.Exp(-2*square(u[4]-0.7))
		}
		if p["enable-prefix-caching"] == "true" {
			rate *= 1.25
		}
		rate *= map[string]float64{"FLASH_ATTN": 1, "FLASHINFER": 1.1, "TRITON_ATTN": 0.8}[p["attention-backend"]]
		return rate, u[0]+0.15*u[1]+0.1*u[2] <= 1.05
	}
	first := maps.Clone(vllmDefaults)
	maps.Copy(first, space.Point{"enable-prefix-caching": "true", "attention-backend": "FLASH_ATTN"})
	return surface{name: "speculative", space: s, rate: rate, best: highestOf(s, rate), first: first}
}

// vllmDefaults has the values that vLLM uses by default.
var vllmDefaults = space.Point{
	"gpu-memory-utilization": "0.9", "max-num-seqs": "256", "max-num-batched-tokens": "2048", "num-speculative-tokens": "0"}

func fourFlags(t testing.TB) *space.Space {
	t.Helper()
	return spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.5, Max: 0.98, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 8, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 512, Max: 32768, Log: true},
		{Name: "num-speculative-tokens", Kind: space.Int, Min: 0, Max: 5},
	}, "max-num-batched-tokens >= max-num-seqs")
}

func unitAndTokens(t testing.TB, s *space.Space, p space.Point) (u []float64, tokens float64) {
	t.Helper()
	u, _ = s.Unit(p)
	tokens, err := s.Parameter("num-speculative-tokens").Number(p["num-speculative-tokens"])
	if err != nil {
		t.Fatal(err)
	}
	return u, tokens
}

// highestOf returns the highest rate that it finds. It tries many random points, and then takes steps from the best
// one.
func highestOf(s *space.Space, rate func(space.Point) (float64, bool)) float64 {
	rng := rand.New(rand.NewPCG(1, 2))
	best := 0.0
	top := make([]float64, len(s.Parameters()))
	for i := range 6000 {
		u := make([]float64, len(top))
		for j := range u {
			if u[j] = rng.Float64(); i >= 3000 {
				u[j] = top[j] + 0.1*math.Exp(-float64(i)/1500)*10*rng.NormFloat64()*float64(rng.IntN(2))
			}
		}
		p := s.Sample(u)
		if at, lives := rate(p); lives && at > best && s.Check(p) == nil {
			top, best = u, at
		}
	}
	return best
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

// A noiseModel says how large the errors of a study's measurements are.
type noiseModel struct {
	noise     float64 // standard deviation of ln capacity
	shared    bool    // most of each error is the same in all trials
	estimated bool    // half of the trials that are clearly worse than the best are dropped, with an estimate whose error is 15 %
	raced     bool    // every trial races against the best one, and noise is the error of its gain; most of it is the luck of that best
}

func (w noiseModel) String() string {
	text := fmt.Sprintf("%.0f %%", 100*w.noise)
	if w.shared {
		text += " shared"
	}
	if w.estimated {
		text += " estimated"
	}
	if w.raced {
		text += " raced"
	}
	return text
}

// estimateErr is the standard error of a dropped trial's estimate.
const estimateErr = 0.15

// measure returns what the study learns of a point.
func (w noiseModel) measure(number int, p space.Point, truth, common, best float64, rng *rand.Rand) studies.Trial {
	draw, coin := rng.NormFloat64(), rng.Float64()
	if w.shared {
		draw = 0.9*common + math.Sqrt(1-0.81)*draw
	}
	measured := truth * math.Exp(w.noise*draw)
	if w.estimated && measured < 0.9*best && coin < 0.5 {
		one := measuredTrial(number, p, truth*math.Exp(estimateErr*draw))
		one.Result.Outcome, one.Result.Class = trial.Dropped, serverctl.DroppedByRace
		one.Result.Capacity = capacity.Capacity{Rate: one.Result.Capacity.Rate, Bound: capacity.Estimated, StdErr: estimateErr}
		return one
	}
	one := measuredTrial(number, p, measured)
	one.Result.Capacity.StdErr = w.noise
	return one
}

// A field is what a race is run against: the best trial so far, its true capacity, and how lucky each best trial was.
type field struct {
	best  int // index in the history; -1 while there is none
	truth float64
	luck  map[int]float64 // by index of the best trial, in standard deviations
}

// race returns what the study learns of a point that races against the best trial of the field.
func (w noiseModel) race(number int, p space.Point, truth float64, on *field, history []studies.Trial, rng *rand.Rand) studies.Trial {
	luck, known := on.luck[on.best]
	if !known {
		luck = rng.NormFloat64()
		on.luck[on.best] = luck
	}
	best := history[on.best].Result.Capacity
	gain := math.Log(truth/on.truth) + w.noise*(math.Sqrt(luckShare)*luck+math.Sqrt(1-luckShare)*rng.NormFloat64())
	one := measuredTrial(number, p, best.Rate*math.Exp(gain))
	one.Result.Capacity.RatioErr = math.Hypot(w.noise, best.RatioErr)
	one.Result.Capacity.StdErr = math.Hypot(w.noise, best.StdErr)
	if gain < -0.1 {
		one.Result.Outcome, one.Result.Class = trial.Dropped, serverctl.DroppedByRace
		one.Result.Capacity.Bound = capacity.Estimated
	}
	return one
}

// checkpoints are the numbers of trials after which regrets are taken.
var checkpoints = []int{10, 20, 30}

// regret runs a study of thirty trials. It returns one regret for each checkpoint: how far the true capacity of the
// reported point lies below the surface's best, from 0 to 1. For gp, the reported point is the recommended point. For
// the other samplers, it is the point that measured best.
func regret(t testing.TB, on surface, name string, seed uint64, w noiseModel) []float64 {
	t.Helper()
	trials := slices.Max(checkpoints)
	chooser := newSampler(t, name, on.space, seed, trials)
	rng := rand.New(rand.NewPCG(seed, 99))
	common := rng.NormFloat64()
	var history []studies.Trial
	best, lost := 0.0, []float64(nil)
	against := field{best: -1, luck: map[int]float64{}}
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
		if truth, lives := on.rate(p); lives {
			one := w.measure(n, p, truth, common, best, rng)
			if w.raced && against.best >= 0 {
				one = w.race(n, p, truth, &against, history, rng)
			}
			history = append(history, one)
			if rate := one.Result.Capacity.Carried(); one.Met() && rate > best {
				against.best, against.truth, best = n, truth, rate
			}
		} else {
			history = append(history, crashedTrial(n, p))
		}
		if slices.Contains(checkpoints, n+1) {
			lost = append(lost, on.regretOf(name, seed, history))
		}
	}
	for len(lost) < len(checkpoints) {
		lost = append(lost, on.regretOf(name, seed, history))
	}
	return lost
}

// regretOf returns the regret of the point that a study would report.
func (on surface) regretOf(name string, seed uint64, history []studies.Trial) float64 {
	best := -1
	for i, t := range history {
		if t.Met() && (best < 0 || t.Result.Capacity.Carried() > history[best].Result.Capacity.Carried()) {
			best = i
		}
	}
	if name == "gp" {
		if numbers := Recommend(on.space, seed, history, 1); len(numbers) > 0 {
			best = numbers[0]
		}
	}
	if best < 0 {
		return 1
	}
	truth, _ := on.rate(history[best].Point)
	return 1 - truth/on.best
}

// TestRegret compares the quick samplers with random search.
func TestRegret(t *testing.T) {
	for _, on := range []surface{h200(t), inner(t), mixed(t)} {
		compareSamplers(t, on, 15, noiseModel{noise: 0.03}, "tpe", "random")
	}
}

// TestGPRegret runs one study on each of two surfaces, because the race detector makes a study take many seconds. The
// bounds are above the 90th percentiles of TestRegretTable.
func TestGPRegret(t *testing.T) {
	for _, row := range []struct {
		on   surface
		most float64
	}{{h200(t), 0.04}, {inner(t), 0.06}} {
		if lost := regret(t, row.on, "gp", 1, noiseModel{noise: 0.03}); lost[len(lost)-1] > row.most {
			t.Errorf("%s: gp's regret after 30 trials is %.1f %%, want at most %.0f %%", row.on.name, 100*lost[len(lost)-1], 100*row.most)
		}
	}
}

// TestRegretAtTwoNoises is TestRegret with gp, and with more noise.
func TestRegretAtTwoNoises(t *testing.T) {
	realtime.Long(t, "runs hundreds of studies")
	for _, on := range []surface{h200(t), inner(t), mixed(t)} {
		for _, noise := range []float64{0.03, 0.08} {
			compareSamplers(t, on, realtime.Rounds(5, 20), noiseModel{noise: noise}, "gp", "tpe", "random")
		}
	}
}

// TestRegretTable writes the table in the comment of type GP. It takes about twenty minutes on one core.
func TestRegretTable(t *testing.T) {
	if os.Getenv("SAMPLER_TABLE") == "" {
		t.Skip("SAMPLER_TABLE=1 runs it, with -timeout 1h")
	}
	for _, on := range []surface{h200(t), inner(t), mixed(t), ridge(t), peaks(t), speculative(t)} {
		for _, w := range []noiseModel{{noise: 0.03}, {noise: 0.08}, {noise: 0.08, shared: true}, {noise: 0.05, estimated: true}, {noise: 0.06, raced: true}} {
			compareSamplers(t, on, 60, w, "gp", "tpe", "random")
		}
	}
}

// compareSamplers runs studies with several seeds and logs the regrets. It fails if a sampler that learns is no better
// than random search after thirty trials.
func compareSamplers(t *testing.T, on surface, seeds int, w noiseModel, names ...string) {
	t.Helper()
	last := map[string]float64{}
	for _, name := range names {
		all := make([][]float64, len(checkpoints))
		for seed := range uint64(seeds) {
			for i, r := range regret(t, on, name, seed, w) {
				all[i] = append(all[i], r)
			}
		}
		line := ""
		for i := range all {
			slices.Sort(all[i])
			line += fmt.Sprintf("  %5.1f %5.1f", 100*all[i][seeds/2], 100*all[i][seeds*9/10])
		}
		last[name] = all[len(all)-1][seeds/2]
		t.Logf("%-11s %-14s %-6s%s", on.name, w, name, line)
	}
	if on.atMost == 0 {
		return
	}
	if w.noise == 0.03 && last["tpe"] > on.atMost {
		t.Errorf("%s: tpe's median regret is %.1f %%, want at most %.0f %%", on.name, 100*last["tpe"], 100*on.atMost)
	}
	for _, name := range names {
		if name != "random" && last[name] > last["random"]-0.01 {
			t.Errorf("%s, %s: the median regret of %s is %.1f %%, want clearly less than random's %.1f %%",
				on.name, w, name, 100*last[name], 100*last["random"])
		}
	}
}
