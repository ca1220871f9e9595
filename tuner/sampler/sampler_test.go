package sampler

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

func spaceOf(t testing.TB, parameters []space.Parameter, constraints ...string) *space.Space {
	t.Helper()
	s, err := space.New(parameters, constraints, map[string]any{"method": "ngram"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newSampler(t testing.TB, name string, s *space.Space, seed uint64, budget int) Sampler {
	t.Helper()
	chooser, err := New(name, s, seed, budget)
	if err != nil {
		t.Fatal(err)
	}
	return chooser
}

// mixedSpace has every kind of parameter, a condition and a constraint.
func mixedSpace(t testing.TB) *space.Space {
	t.Helper()
	return spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.7, Max: 0.97, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 8, Max: 1024, Log: true},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 64, Max: 8192, Log: true},
		{Name: "enable-prefix-caching", Kind: space.Bool},
		{Name: "num-speculative-tokens", Kind: space.Categorical, Choices: []string{"0", "1", "3"}},
		{Name: "compilation-config", Kind: space.JSON, Choices: []string{`{"mode":0}`, `{"mode":3}`}},
		{Name: "long-prefill-token-threshold", Kind: space.Int, Min: 0, Max: 4096, Step: 512, When: "max-num-batched-tokens > 4096"},
	}, "max-num-batched-tokens >= max-num-seqs")
}

// anyHistory is a seeded history with every kind of trial.
func anyHistory(t testing.TB, s *space.Space, seed uint64, n int) []studies.Trial {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 5))
	var history []studies.Trial
	for i := range n {
		p, err := draw(s, rng, nil)
		if err != nil {
			t.Fatal(err)
		}
		one := measuredTrial(i, p, math.Exp(rng.NormFloat64()))
		switch rng.IntN(8) {
		case 0:
			one.Result = trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart}
		case 1:
			one.Result = trial.Result{Outcome: trial.Unknown, Class: serverctl.Infrastructure}
		case 2:
			one.State, one.Result = studies.Running, trial.Result{}
		case 3:
			one.Point = space.Point{} // the server's default
		case 4:
			one.Point = space.Point{"gpu-memory-utilization": "0.5", "max-num-seqs": "4000"} // args of the user outside the ranges
		case 5:
			one.Result.Capacity = capacity.Capacity{Rate: 0.05, High: 0.05, Bound: capacity.AtMost}
		case 6:
			one.Result = trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero}
		}
		history = append(history, one)
	}
	return history
}

// For any history every sampler gives an untried legal point, or says that it has none.
func TestNextIsLegalForAnyHistory(t *testing.T) {
	s := mixedSpace(t)
	for seed := range uint64(10) {
		history := anyHistory(t, s, seed, 6*int(seed))
		for _, name := range names {
			chooser := newSampler(t, name, s, seed, 40)
			p, err := chooser.Next(len(history), history)
			if errors.Is(err, ErrExhausted) && name == "grid" {
				continue
			}
			if err != nil {
				t.Fatalf("%s, seed %d: %v", name, seed, err)
			}
			if err := s.Check(p); err != nil || Tried(history)[p.String()] {
				t.Errorf("%s, seed %d: %s is not legal (%v) or was tried", name, seed, p, err)
			}
		}
	}
}

// somePoints returns the points that a sampler gives for one history at four trial numbers.
func somePoints(t testing.TB, name string) string {
	t.Helper()
	s := mixedSpace(t)
	history := anyHistory(t, s, 3, 25)
	chooser := newSampler(t, name, s, 7, 40)
	var text strings.Builder
	for number := 25; number < 29; number++ {
		p, err := chooser.Next(number, history)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(&text, p)
	}
	return text.String()
}

// The next point depends only on the seed, the number and the history. It does not depend on the process.
func TestNextIsReproducible(t *testing.T) {
	if name := os.Getenv("SAMPLER_TEST_PRINT"); name != "" {
		fmt.Print("BEGIN\n", somePoints(t, name), "END\n")
		return
	}
	for _, name := range names {
		want := somePoints(t, name)
		child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=TestNextIsReproducible")
		child.Env = append(os.Environ(), "SAMPLER_TEST_PRINT="+name)
		out, err := child.Output()
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(out), "BEGIN\n"+want+"END\n") {
			t.Errorf("%s: another process gives\n%s\nwant\n%s", name, out, want)
		}
		if name == "grid" || name == "halton" || name == "sobol" {
			continue // the next point of these samplers is the same for every trial number
		}
		if lines := strings.Split(want, "\n"); lines[0] == lines[1] {
			t.Errorf("%s: two trials get the same point %s", name, lines[0])
		}
	}
}

func TestTPEComesToTheGoodRegion(t *testing.T) {
	s := mixedSpace(t)
	chooser := newSampler(t, "tpe", s, 1, 100)
	rng := rand.New(rand.NewPCG(1, 1))
	var history []studies.Trial
	good := 0
	for n := range 60 {
		p, err := chooser.Next(n, history)
		if err != nil {
			t.Fatal(err)
		}
		u, _ := s.Unit(p)
		rate := math.Exp(-4*math.Abs(u[0]-0.9)) * (1 + rng.Float64()/50)
		if p["num-speculative-tokens"] == "3" {
			rate *= 2
		}
		one := measuredTrial(n, p, rate)
		if u[0] > 0.97 { // servers crash right above the best value
			one.Result = trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart}
		}
		history = append(history, one)
		if n >= 40 && p["num-speculative-tokens"] == "3" && u[0] > 0.6 && u[0] <= 0.97 {
			good++
		}
	}
	if good < 10 { // random points would give 20 · 1/3 · 0.37 = 2.5
		t.Errorf("of the last 20 points %d lie in the good region, want at least 10", good)
	}
}

func TestSamplersEnd(t *testing.T) {
	s := spaceOf(t, []space.Parameter{{Name: "a", Kind: space.Int, Min: 1, Max: 3}})
	for _, name := range names {
		chooser := newSampler(t, name, s, 1, 10)
		var history []studies.Trial
		for n := 0; ; n++ {
			p, err := chooser.Next(n, history)
			if errors.Is(err, ErrExhausted) && n == 3 {
				break
			}
			if err != nil || n == 3 {
				t.Fatalf("%s: after %d points Next = %v, %v; want three points and ErrExhausted", name, n, p, err)
			}
			history = append(history, measuredTrial(n, p, 1))
		}
	}
}

func TestNewNamesTheNearestSampler(t *testing.T) {
	_, err := New("tpee", mixedSpace(t), 1, 10)
	if err == nil || !strings.Contains(err.Error(), `did you mean "tpe"?`) {
		t.Errorf("New = %v, want the nearest name", err)
	}
}

// Observations rank capacities first, then upper bounds, then infeasible points. Other trials are left out.
func TestObserveAndSplit(t *testing.T) {
	s := mixedSpace(t)
	at := func(util string) space.Point { return space.Point{"gpu-memory-utilization": util} }
	unmet := measuredTrial(0, at("0.71"), 5)
	unmet.Result.Capacity.Bound = capacity.AtMost
	unknown := measuredTrial(0, at("0.72"), 9)
	unknown.Result.Outcome = trial.Unknown
	running := measuredTrial(0, at("0.73"), 9)
	running.State = studies.Running
	history := []studies.Trial{
		unmet, unknown, running, crashedTrial(0, at("0.74")), measuredTrial(0, at("0.75"), math.NaN()),
		measuredTrial(0, at("0.76"), 1), measuredTrial(0, at("0.77"), math.Inf(1)), measuredTrial(0, space.Point{}, 9),
		measuredTrial(0, at("0.78"), 2),
	}
	better, worse := split(observe(s, history))
	var got []string
	for _, o := range append(better, worse...) {
		got = append(got, s.Sample(o.unit)["gpu-memory-utilization"])
	}
	if want := "0.78 0.76 0.71 0.74"; strings.Join(got, " ") != want || len(better) != 1 {
		t.Errorf("the observations, best first, are %v with %d good ones; want %s and 1", got, len(better), want)
	}
	if better, _ := split(observe(s, history[:5])); len(better) != 0 {
		t.Errorf("%d trials are good, though none met the SLO", len(better))
	}
}

func TestAGridHasAllChoicesAndFitsTheBudget(t *testing.T) {
	s := inner(t).space
	for _, budget := range []int{40, 60, 200} {
		g, err := newGrid(s, 1, budget)
		if err != nil {
			t.Fatal(err)
		}
		values := map[string]map[string]bool{}
		for _, p := range g.points {
			for name, value := range p {
				if values[name] == nil {
					values[name] = map[string]bool{}
				}
				values[name][value] = true
			}
		}
		if n := len(g.points); n > budget || n < budget/2 || len(values["num-speculative-tokens"]) != 5 {
			t.Errorf("a grid for %d trials has %d points with %d of 5 choices", budget, n, len(values["num-speculative-tokens"]))
		}
	}
}

func TestAGridThatCannotBeIsRefused(t *testing.T) {
	var many []space.Parameter
	for i := range 20 {
		many = append(many, space.Parameter{Name: fmt.Sprintf("flag-%c", 'a'+i), Kind: space.Bool})
	}
	huge := spaceOf(t, many)
	empty := spaceOf(t, []space.Parameter{{Name: "max-num-seqs", Kind: space.Int, Min: 1, Max: 9}}, "max-num-seqs > 9")
	for _, row := range []struct {
		space *space.Space
		want  string
	}{
		{huge, "20 parameters need at least 1048576 points, more than 16384; search fewer of them"},
		{empty, "none of its points keeps the constraints; widen the ranges"},
	} {
		if _, err := New("grid", row.space, 1, 30); err == nil || !strings.Contains(err.Error(), row.want) {
			t.Errorf("New = %v, want %q", err, row.want)
		}
	}
}

// When no draw finds a legal point, the error names the constraint.
func TestAnImpossibleConstraintIsNamed(t *testing.T) {
	s := spaceOf(t, []space.Parameter{{Name: "max-num-seqs", Kind: space.Int, Min: 1, Max: 9}}, "max-num-seqs > 9")
	for _, name := range []string{"gp", "tpe", "random", "sobol", "halton"} {
		chooser := newSampler(t, name, s, 1, 30)
		if _, err := chooser.Next(0, nil); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "max-num-seqs > 9") {
			t.Errorf("%s: Next = %v, want ErrExhausted with the constraint", name, err)
		}
	}
}

// A history may have been stored by another version of the tuner, so a point may hold any text.
func FuzzNext(f *testing.F) {
	f.Add("gpu-memory-utilization", "0.9", 1.0, "measured", uint8(9))
	f.Add("max-num-seqs", "NaN", math.Inf(1), "infeasible", uint8(30))
	f.Add("num-speculative-tokens", "-1", -1.0, "measured", uint8(7))
	f.Add("", "\xff", math.NaN(), "", uint8(0))
	f.Fuzz(func(t *testing.T, name, value string, rate float64, outcome string, n uint8) {
		s := mixedSpace(t)
		var history []studies.Trial
		for i := range int(n % 40) {
			one := measuredTrial(i, space.Point{name: value, "max-num-seqs": fmt.Sprint(i)}, rate)
			one.Result.Outcome = trial.Outcome(outcome)
			history = append(history, one)
		}
		for _, name := range []string{"gp", "tpe", "random", "sobol", "halton"} {
			chooser := newSampler(t, name, s, uint64(n), 40)
			p, err := chooser.Next(int(n), history)
			if err != nil || s.Check(p) != nil {
				t.Fatalf("%s: Next = %v, %v, want a legal point", name, p, err)
			}
		}
	})
}

// A dropped trial ranks above infeasible points, and below trials that kept the SLO or broke it at a known rate.
func TestADroppedTrialIsALoserAndNoCrash(t *testing.T) {
	s := mixedSpace(t)
	points := anyHistory(t, s, 1, 8)
	var history []studies.Trial
	for i, result := range []trial.Result{
		{Outcome: trial.Infeasible, Class: serverctl.OOMStart},
		{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero},
		{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 0.05, High: 0.05, Bound: capacity.AtMost}},
		{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 2, Low: 2, High: 2.2, Bound: capacity.Exact}},
		{Outcome: trial.Unknown, Class: serverctl.Infrastructure},
	} {
		history = append(history, studies.Trial{Number: i, State: studies.Done, Point: points[i].Point, Result: result})
	}
	better, worse := split(observe(s, history))
	var got []outcomeRank
	for _, o := range append(better, worse...) {
		got = append(got, o.rank)
	}
	if want := []outcomeRank{met, upperBound, upperBound, infeasible}; len(better) != 1 || !slices.Equal(got, want) || worse[1].rate != 0 {
		t.Errorf("the ranks, best first, are %v with %d good ones, want %v and one", got, len(better), want)
	}
}

// A capacity that a late load generator measured is a lower bound. A high bound makes the trial good, and a low bound
// says nothing.
func TestAClientLimitedTrialIsNoLoser(t *testing.T) {
	s := mixedSpace(t)
	points := anyHistory(t, s, 1, 8)
	for _, row := range []struct {
		limited float64
		good    bool
	}{{1.5, false}, {9, true}} {
		var history []studies.Trial
		for i, rate := range []float64{3, row.limited, 1, 2} {
			one := measuredTrial(i, points[i].Point, rate)
			if i == 1 {
				one.Result.Class, one.Result.Capacity.Bound = serverctl.ClientLimited, capacity.AtLeast
			}
			history = append(history, one)
		}
		better, worse := split(observe(s, history))
		isLimited := func(o observation) bool { return o.rate == row.limited }
		if got := slices.ContainsFunc(better, isLimited); got != row.good || slices.ContainsFunc(worse, isLimited) || len(better) != 1 {
			t.Errorf("at least %g req/s of 1 to 3 is good: %t, a loser: %t; want %t, and never a loser", row.limited, got, slices.ContainsFunc(worse, isLimited), row.good)
		}
	}
}

// TPE learns from a prior, and the prior's point can still be tried.
func TestAPriorIsNotATrial(t *testing.T) {
	s := mixedSpace(t)
	grid := newSampler(t, "grid", s, 1, 20)
	first, err := grid.Next(0, nil)
	if err != nil {
		t.Fatal(err)
	}
	history := anyHistory(t, s, 3, 12)
	for i := range history {
		history[i].Number, history[i].Origin, history[i].Point = -1, studies.Prior, first
	}
	if again, err := grid.Next(0, history); err != nil || again.String() != first.String() {
		t.Errorf("Next = %s, %v; want %s, which only a prior has measured", again, err, first)
	}
	if observed := observe(s, history); len(observed) == 0 {
		t.Error("TPE learns nothing from priors")
	}
}
