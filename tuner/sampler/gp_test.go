package sampler

import (
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// oneNumber is the space of utilizations.
func oneNumber(t testing.TB) *space.Space {
	return spaceOf(t, []space.Parameter{{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0, Max: 1, Step: 0.01}})
}

func utilization(text string) space.Point { return space.Point{"gpu-memory-utilization": text} }

// A bound moves the model only if the other trials contradict it.
func TestTheModelKeepsBounds(t *testing.T) {
	s := oneNumber(t)
	for _, row := range []struct {
		name  string
		bound capacity.Bound
		rate  float64
		low   float64 // lower end of the range for the expected capacity at the bound's point
		high  float64
	}{
		{"an upper bound below the others", capacity.AtMost, 0.5, 0.2, 0.56},
		{"an upper bound far above the others", capacity.AtMost, 20, 0.7, 1.5},
		{"a lower bound above the others", capacity.AtLeast, 3, 2.6, 6},
		{"a lower bound far below the others", capacity.AtLeast, 0.1, 0.7, 1.5},
	} {
		history := []studies.Trial{
			measuredTrial(0, utilization("0.1"), 1), measuredTrial(1, utilization("0.3"), 1.05),
			measuredTrial(2, utilization("0.5"), 0.95), measuredTrial(3, utilization("0.9"), row.rate),
		}
		history[3].Result.Capacity = capacity.Capacity{Rate: row.rate, Bound: row.bound}
		if row.bound == capacity.AtLeast {
			history[3].Result.Capacity.Low = row.rate
		}
		if got := math.Exp(expectations(s, 1, history)[3]); !(row.low <= got && got <= row.high) {
			t.Errorf("%s: at a bound of %g the model expects %.2f, want %g to %g", row.name, row.rate, got, row.low, row.high)
		}
	}
}

// After a server ran out of memory, the backstop forbids points with more work and more memory for the KV cache. After
// a KV cache was too small, it forbids points with more work and less memory for the cache.
func TestTheBackstop(t *testing.T) {
	s := spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.5, Max: 0.98, Step: 0.01},
		{Name: "max-num-seqs", Kind: space.Int, Min: 8, Max: 1024},
		{Name: "kv-cache-dtype", Kind: space.Categorical, Choices: []string{"auto", "fp8"}},
		{Name: "long-prefill-token-threshold", Kind: space.Int, Min: 0, Max: 4096},
	})
	at := func(util, seqs, dtype, threshold string) space.Point {
		return space.Point{"gpu-memory-utilization": util, "max-num-seqs": seqs, "kv-cache-dtype": dtype, "long-prefill-token-threshold": threshold}
	}
	failed := at("0.9", "128", "auto", "0")
	for _, row := range []struct {
		class   serverctl.Class
		point   space.Point
		forbids bool
	}{
		{serverctl.OOMStart, at("0.92", "256", "auto", "512"), true},
		{serverctl.OOMLoad, at("0.9", "128", "auto", "0"), true},
		{serverctl.OOMStart, at("0.92", "64", "auto", "0"), false},
		{serverctl.OOMStart, at("0.89", "256", "auto", "0"), false},
		{serverctl.OOMStart, at("0.92", "256", "fp8", "0"), false},
		{serverctl.KVTooSmall, at("0.88", "256", "auto", "0"), true},
		{serverctl.KVTooSmall, at("0.92", "256", "auto", "0"), false},
		{serverctl.KVTooSmall, at("0.88", "64", "auto", "0"), false},
		{serverctl.StartCrash, at("0.92", "256", "auto", "0"), false},
	} {
		one := crashedTrial(0, failed)
		one.Result.Class = row.class
		if got := newBackstop(s, []studies.Trial{one}).forbids(row.point); got != row.forbids {
			t.Errorf("after %s at %s, %s is forbidden: %t, want %t", row.class, failed, row.point, got, row.forbids)
		}
		one.Number = -1
		if newBackstop(s, []studies.Trial{one}).forbids(row.point) {
			t.Errorf("a prior's %s forbids %s", row.class, row.point)
		}
	}
}

// A failure with one number of GPUs says nothing about the memory with another number. Servers with the same number of
// GPUs also differ if the GPUs are divided in another way.
func TestTheBackstopKeepsNumbersOfGPUsApart(t *testing.T) {
	s := spaceOf(t, []space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.5, Max: 0.98, Step: 0.01},
		{Name: "tensor-parallel-size", Kind: space.Categorical, Choices: []string{"1", "2", "4"}},
		{Name: "pipeline-parallel-size", Kind: space.Int, Min: 1, Max: 2},
	})
	at := func(util, tensor, pipeline string) space.Point {
		return space.Point{"gpu-memory-utilization": util, "tensor-parallel-size": tensor, "pipeline-parallel-size": pipeline}
	}
	for _, class := range []serverctl.Class{serverctl.OOMLoad, serverctl.OOMStart, serverctl.KVTooSmall} {
		one := crashedTrial(0, at("0.9", "2", "1"))
		one.Result.Class = class
		b := newBackstop(s, []studies.Trial{one})
		for _, other := range []space.Point{at("0.9", "1", "1"), at("0.9", "4", "1"), at("0.9", "2", "2"), at("0.9", "1", "2")} {
			if b.forbids(other) {
				t.Errorf("after %s on 2 × 1 GPUs, %s is forbidden", class, other)
			}
		}
		if !b.forbids(at("0.9", "2", "1")) {
			t.Errorf("after %s, the same point is allowed", class)
		}
	}
}

// While other points are allowed, gp and tpe never choose a point that the backstop forbids.
func TestSamplersKeepTheBackstop(t *testing.T) {
	on := inner(t)
	for _, name := range []string{"gp", "tpe"} {
		chooser := newSampler(t, name, on.space, 3, 30)
		var history []studies.Trial
		for n := range 30 {
			p, err := chooser.Next(n, history)
			if err != nil {
				t.Fatal(err)
			}
			if newBackstop(on.space, history).forbids(p) {
				t.Errorf("%s, trial %d: %s asks for at least as much memory as a point that ran out of it", name, n, p)
			}
			if rate, lives := on.rate(p); lives {
				history = append(history, measuredTrial(n, p, rate))
			} else {
				history = append(history, crashedTrial(n, p))
			}
		}
	}
}

// An inactive flag is equally far from all its values. In the same way, 0 speculative tokens are equally far from all
// other numbers.
func TestInactiveIsNoValue(t *testing.T) {
	s := speculative(t).space
	base := space.Point{"gpu-memory-utilization": "0.9", "max-num-seqs": "128", "max-num-batched-tokens": "2048",
		"num-speculative-tokens": "3", "prompt-lookup-max": "2", "enable-prefix-caching": "true", "attention-backend": "FLASHINFER"}
	with := func(tokens, lookup string) row {
		p := space.Point{}
		maps.Copy(p, base)
		p["num-speculative-tokens"], p["prompt-lookup-max"] = tokens, lookup
		if lookup == "" {
			delete(p, "prompt-lookup-max")
		}
		return rowOf(s, p)
	}
	k := someKernel(dimensions(s, nil))
	none := with("0", "")
	first := k.covariance(none, with("1", "2"))
	for _, other := range []row{with("3", "5"), with("5", "9"), with("2", "6")} {
		if got := k.covariance(none, other); math.Abs(got-first) > 1e-12 {
			t.Errorf("the covariance of no speculation and some is %.4f or %.4f, want the same", got, first)
		}
	}
	if !(first < k.covariance(none, none)) || !(k.covariance(with("3", "2"), with("3", "9")) < k.covariance(with("3", "2"), with("3", "2"))) {
		t.Error("the kernel does not tell the values apart")
	}
}

func someKernel(dimensions []dimension) *kernel {
	k := &kernel{dimensions: dimensions, signal: 1, constant: 0.1}
	for i := range dimensions {
		k.inverse, k.alike = append(k.inverse, 1+float64(i)), append(k.alike, 0.2+0.07*float64(i))
	}
	return k
}

// Covariances must be positive definite, also of points with absent flags.
func TestTheKernelIsPositiveDefinite(t *testing.T) {
	s := speculative(t).space
	rng := rand.New(rand.NewPCG(1, 1))
	for range 20 {
		var data []datum
		var rows []row
		for range 60 {
			p, err := draw(s, rng, nil)
			if err != nil {
				t.Fatal(err)
			}
			if rng.IntN(4) == 0 {
				delete(p, "max-num-seqs")
			}
			rows = append(rows, rowOf(s, p))
			data = append(data, datum{row: rows[len(rows)-1], variance: 1e-9})
		}
		p := condition(*someKernel(dimensions(s, rows)), data, nil)
		if _, variance := p.predict(rows); slices.Max(variance) > 1e-6 || math.IsNaN(p.fit) {
			t.Fatalf("the variance at measured points is up to %g, the fit %g", slices.Max(variance), p.fit)
		}
	}
}

// When every server fails, the sampler goes on, and moves away from the failed points.
func TestAllInfeasible(t *testing.T) {
	s := inner(t).space
	chooser := newSampler(t, "gp", s, 1, 30)
	history := []studies.Trial{crashedTrial(0, space.Point{})}
	for n := 1; n < 12; n++ {
		p, err := chooser.Next(n, history)
		if err != nil || s.Check(p) != nil || Tried(history)[p.String()] {
			t.Fatalf("after %d crashes Next = %s, %v", n, p, err)
		}
		history = append(history, crashedTrial(n, p))
	}
	if got := Recommend(s, 1, history, 3); len(got) != 0 {
		t.Errorf("Recommend = %v, though nothing was measured", got)
	}
}

func TestASpaceWithOnePoint(t *testing.T) {
	for _, s := range []*space.Space{spaceOf(t, nil), spaceOf(t, []space.Parameter{{Name: "max-num-seqs", Kind: space.Int, Min: 8, Max: 8}})} {
		for _, name := range []string{"gp", "halton"} {
			chooser := newSampler(t, name, s, 1, 5)
			p, err := chooser.Next(0, nil)
			if err != nil {
				t.Fatal(err)
			}
			history := []studies.Trial{measuredTrial(0, p, 1)}
			for range 6 {
				if _, err := chooser.Next(len(history), history); !errors.Is(err, ErrExhausted) {
					t.Errorf("%s: after the only point Next gives %v, want ErrExhausted", name, err)
				}
				history = append(history, measuredTrial(len(history), p, 1.1))
			}
		}
	}
}

// Rates of any size give finite expectations.
func TestExtremeRates(t *testing.T) {
	s := mixedSpace(t)
	chooser := newGP(s, 1)
	history := anyHistory(t, s, 9, 12)
	for i, rate := range []float64{1e-300, math.MaxFloat64, math.SmallestNonzeroFloat64, 1, 1e-9, 5} {
		history[i] = measuredTrial(i, history[i].Point, rate)
		history[i].Result.Capacity.StdErr = []float64{0, math.NaN(), math.Inf(1), 1e-300, 1e300, -1}[i]
	}
	for i, m := range expectations(s, 1, history) {
		if math.IsNaN(m) || math.IsInf(m, 0) {
			t.Errorf("trial %d is expected to have ln capacity %g", i, m)
		}
	}
	if gain := chooser.Promise(12, history); !(gain >= 0) || math.IsInf(gain, 1) {
		t.Errorf("Promise = %g", gain)
	}
	if _, err := chooser.Next(12, history); err != nil {
		t.Error(err)
	}
}

// A recommendation believes the neighbourhood and not one lucky measurement, and prefers trials that passed a probe.
func TestRecommend(t *testing.T) {
	s := oneNumber(t)
	var history []studies.Trial
	for n, text := range []string{"0.05", "0.15", "0.25", "0.4", "0.5", "0.6", "0.75", "0.85", "0.95"} {
		u := []float64{0.05, 0.15, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85, 0.95}[n]
		history = append(history, measuredTrial(n, utilization(text), math.Exp(-2*square(u-0.5))))
		history[n].Result.Capacity.StdErr = 0.01
	}
	lucky := measuredTrial(9, utilization("0.1"), 1.1)
	lucky.Result.Capacity.StdErr = 0.3
	history = append(history, lucky)
	if got := Recommend(s, 1, history, 3); got[0] != 4 || len(got) != 3 || slices.Contains(got, 9) {
		t.Errorf("Recommend = %v, want trial 4 first, and 9 not", got)
	}
	for i := range history {
		history[i].Result.Capacity = capacity.Capacity{Rate: history[i].Result.Capacity.Rate, Bound: capacity.AtMost}
	}
	if got := Recommend(s, 1, history, 20); len(got) != len(history) {
		t.Errorf("of %d trials that never passed a probe Recommend gives %v", len(history), got)
	}
	history[0].Result.Capacity = capacity.Capacity{Rate: 0.1, Low: 0.1, Bound: capacity.Exact}
	if got := Recommend(s, 1, history, 20); !slices.Equal(got, []int{0}) {
		t.Errorf("Recommend = %v, want the one trial that passed a probe", got)
	}
}

// The probability that a server runs falls from the points that run to the points that fail.
func TestFeasibilityIsLearned(t *testing.T) {
	s := oneNumber(t)
	var history []studies.Trial
	for n, text := range []string{"0.1", "0.4", "0.6", "0.85", "0.95"} {
		history = append(history, measuredTrial(n, utilization(text), 1))
		if n >= 3 {
			history[n].Result = trial.Result{Outcome: trial.Infeasible, Class: serverctl.StartCrash}
		}
	}
	b := newBelief(s, learn(s, 5, history), stream(1, "test", 0))
	runs := b.feasible.runProbabilities([]row{rowOf(s, utilization("0.3")), rowOf(s, utilization("0.7")), rowOf(s, utilization("0.99"))})
	if !(runs[0] > 0.8 && runs[0] > runs[1] && runs[1] > runs[2] && runs[2] < 0.3) {
		t.Errorf("0.3, 0.7 and 0.99 run with probabilities %.2f; 0.85 failed", runs)
	}
}

// A neighbour of a point that failed probably fails too. A point lacks KV memory for another reason than memory: between
// the two, points run.
func TestWhatAPointLackedHasABorderOfItsOwn(t *testing.T) {
	s := oneNumber(t)
	var history []studies.Trial
	for n, row := range []struct {
		text  string
		class serverctl.Class
	}{{"0.5", ""}, {"0.6", ""}, {"0.3", serverctl.KVTooSmall}, {"0.8", serverctl.OOMStart}} {
		history = append(history, measuredTrial(n, utilization(row.text), 1))
		if row.class != "" {
			history[n].Result = trial.Result{Outcome: trial.Infeasible, Class: row.class}
		}
	}
	b := newBelief(s, learn(s, 5, history), stream(1, "test", 0))
	if len(b.feasible) != 2 {
		t.Fatalf("%d models, want one for memory and one for KV memory", len(b.feasible))
	}
	for text, runs := range map[string]bool{"0.1": false, "0.29": false, "0.55": true, "0.81": false, "0.95": false} {
		if p := b.feasible.runProbabilities([]row{rowOf(s, utilization(text))})[0]; p > 0.3 && !runs || p < 0.8 && runs {
			t.Errorf("%s runs with a probability of %.2f; 0.5 and 0.6 ran, 0.3 and 0.8 failed", text, p)
		}
	}
}

// The model learns from the server's default if its values are known.
func TestTheDefaultIsPlaced(t *testing.T) {
	s := inner(t).space
	one := measuredTrial(0, space.Point{}, 2)
	if l := learn(s, 1, []studies.Trial{one}); len(l.values) != 0 {
		t.Errorf("a default of unknown values is placed at %v", l.values[0].row)
	}
	one.Result.Facts.Args = map[string]string{"max-num-seqs": "256", "max-num-batched-tokens": "2048"}
	l := learn(s, 1, []studies.Trial{one})
	want := rowOf(s, space.Point{"gpu-memory-utilization": "0.9", "max-num-seqs": "256", "max-num-batched-tokens": "2048", "num-speculative-tokens": "0"})
	if len(l.values) != 1 || !slices.Equal(l.values[0].row, want) {
		t.Errorf("the default is placed at %v, want %v", l.values, want)
	}
}

// Estimates of dropped trials are values. Trials whose drafts are not accepted are no better than those without drafts.
func TestDroppedTrialsAsLessons(t *testing.T) {
	s := inner(t).space
	at := func(seqs, tokens string) space.Point {
		return space.Point{"gpu-memory-utilization": "0.8", "max-num-seqs": seqs, "max-num-batched-tokens": "4096", "num-speculative-tokens": tokens}
	}
	raced, idle := measuredTrial(2, at("64", "0"), 1.5), measuredTrial(3, at("64", "2"), 0)
	raced.Result.Outcome, raced.Result.Class = trial.Dropped, serverctl.DroppedByRace
	raced.Result.Capacity = capacity.Capacity{Rate: 1.5, StdErr: 0.2, Bound: capacity.Estimated}
	idle.Result = trial.Result{Outcome: trial.Dropped, Class: serverctl.AcceptanceNearZero}
	history := []studies.Trial{measuredTrial(0, at("128", "0"), 2), measuredTrial(1, at("128", "3"), 3), raced, idle}
	l := learn(s, 4, history)
	if d := l.values[2]; d.side != exact || d.err != 0.2 || math.Abs(d.value-math.Log(1.5)) > 1e-9 {
		t.Errorf("an estimate is learned as %+v", d)
	}
	if d := l.values[3]; d.side != below {
		t.Errorf("a trial without accepted drafts is learned as %+v, want an upper bound", d)
	}
	if better, worse := split(observe(s, history)); len(better)+len(worse) != 4 || worse[1].rate != 1.5 || worse[1].rank != met {
		t.Errorf("tpe sees %+v and %+v, want the estimate third", better, worse)
	}
}

// Trials that run now count as measured, so that parallel trials spread out.
func TestPendingPointsSpread(t *testing.T) {
	on := inner(t)
	chooser := newSampler(t, "gp", on.space, 5, 30)
	var history []studies.Trial
	for n := range 12 {
		p, err := chooser.Next(n, history)
		if err != nil {
			t.Fatal(err)
		}
		if rate, lives := on.rate(p); lives {
			history = append(history, measuredTrial(n, p, rate))
		} else {
			history = append(history, crashedTrial(n, p))
		}
	}
	before := chooser.(*GP).Promise(12, history)
	for n := 12; n < 16; n++ {
		p, err := chooser.Next(n, history)
		if err != nil {
			t.Fatal(err)
		}
		history = append(history, studies.Trial{Number: n, Point: p, State: studies.Running})
	}
	if after := chooser.(*GP).Promise(16, history); !(after < before) {
		t.Errorf("with four points running one more promises %.4f, alone %.4f", after, before)
	}
}

// manyTrials returns a space of eight flags, and a history of 200 trials, as in a long study.
func manyTrials(t testing.TB) (*space.Space, []studies.Trial) {
	on := speculative(t)
	rng := rand.New(rand.NewPCG(1, 1))
	var history []studies.Trial
	known := map[string]bool{}
	for n := range 200 {
		p, err := draw(on.space, rng, known)
		if err != nil {
			t.Fatal(err)
		}
		known[p.String()] = true
		rate, lives := on.rate(p)
		one := measuredTrial(n, p, rate*math.Exp(0.05*rng.NormFloat64()))
		switch {
		case !lives:
			one = crashedTrial(n, p)
		case n%20 == 0:
			one.Result.Capacity = capacity.Capacity{Rate: rate, Bound: capacity.AtMost}
		}
		history = append(history, one)
	}
	return on.space, history
}

// After 200 trials, a call of Next takes at most a second on one core. The test allows three seconds of CPU time,
// because cores differ.
func TestNextIsFastEnough(t *testing.T) {
	realtime.Only(t, "measures speed")
	s, history := manyTrials(t)
	chooser := newSampler(t, "gp", s, 1, 300)
	began := cpuTime(t)
	if _, err := chooser.Next(200, history); err != nil {
		t.Fatal(err)
	}
	const limit = 3 * time.Second
	if took := cpuTime(t) - began; took > limit {
		t.Errorf("Next among 200 trials took %v of CPU time, want at most %v", took, limit)
	}
}

func cpuTime(t testing.TB) time.Duration {
	t.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		t.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

func BenchmarkNextAmong200Trials(b *testing.B) {
	s, history := manyTrials(b)
	chooser := newSampler(b, "gp", s, 1, 300)
	for b.Loop() {
		if _, err := chooser.Next(200, history); err != nil {
			b.Fatal(err)
		}
	}
}

// A variable that may be unset is unset where a trial does not name it. So the server's default is one point with it.
func TestAnAbsentVariableIsUnset(t *testing.T) {
	s, err := space.New([]space.Parameter{
		{Name: "max-num-seqs", Kind: space.Int, Min: 1, Max: 64},
		{Name: "OMP_NUM_THREADS", Kind: space.Categorical, Choices: []string{space.Unset, "1"}},
		{Name: "VLLM_X", Kind: space.Categorical, Choices: []string{"0", "1"}},
	}, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	p, whole := Complete(s, studies.Trial{Point: space.Point{"max-num-seqs": "8"}})
	if p.String() != "OMP_NUM_THREADS=unset max-num-seqs=8" || whole {
		t.Errorf("Complete = %s, whole %v; want OMP_NUM_THREADS unset and VLLM_X unknown", p, whole)
	}
}
