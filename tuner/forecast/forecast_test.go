package forecast

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/realtime"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/simload"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

func TestPredictedLengths(t *testing.T) {
	study := trial.Lengths{LeadIn: time.Minute, Window: 2 * time.Minute, MinRequests: 300}
	for _, row := range []struct {
		cache       trial.Protocol
		rate        float64
		window      time.Duration
		minRequests int
	}{
		{trial.Primed, 2, 400 * time.Second, 800},
		{trial.Steady, 0.5, 1600 * time.Second, 800},
		{trial.Primed, 1000, minWindow, 800},
		{trial.Steady, 0, 2 * time.Minute, 800},
		{trial.Reset, 2, 2 * time.Minute, 300},
		{trial.Reset, 20, 40 * time.Second, 300},
	} {
		got := predictedLengths(study, row.cache, row.rate)
		if want := (trial.Lengths{LeadIn: time.Minute, Window: row.window, MinRequests: row.minRequests}); got != want {
			t.Errorf("cache %s at %g req/s: %+v, want %+v", row.cache, row.rate, got, want)
		}
	}
}

const file = `version: 1
name: small
model: example/small
server: {simulate: small-fast, args: [--max-model-len, "4096"]}
slo: {ttft_p99: 150ms, tpot_p99: 25ms}
workload: {kind: random, input_tokens: 300, output_tokens: 40, range_ratio: 0.5, requests: 400}
parameters:
  gpu-memory-utilization: {float: [0.3, 0.97], step: 0.01}
  max-num-seqs: {int: [2, 64], log: true}
  max-num-batched-tokens: {int: [256, 4096], log: true}
constraints: ["max-num-batched-tokens >= max-num-seqs"]
probe: {seconds: 10, min_requests: 100, lead_in: 2s}
prior: simulate
`

// forecaster returns a Forecaster for the file.
func forecaster(t *testing.T) *Forecaster {
	t.Helper()
	f, err := studyfile.Parse("small.yaml", []byte(file))
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.OpenSearch(f)
	if err != nil {
		t.Fatal(err)
	}
	made, err := New(p)
	if err != nil || made == nil {
		t.Fatalf("New = %v, %v", made, err)
	}
	made.points = 24
	return made
}

// open returns a Forecaster of a study, and the study with a first trial. The constants of the study's server differ
// from those of every profile.
func open(t *testing.T) (*Forecaster, studies.Study, *sim.Profile) {
	t.Helper()
	f := forecaster(t)
	profile, err := sim.LoadProfile("small-fast")
	if err != nil {
		t.Fatal(err)
	}
	for path, factor := range map[string]float64{"step.weights": 1.2, "step.per_token": 0.8, "step.per_kv_token": 1.2, "memory.activation": 1.2} {
		*profile.Value(path) *= factor
	}
	f.Profiles = append(f.Profiles, mustLoad(t, "small-fast"))
	runner := f.runner()
	runner.Start = (&simload.Rig{Profile: profile}).Start
	first := studies.Trial{Origin: studies.Default, Point: space.Point{}, Args: f.FixedArgs, State: studies.Done}
	first.Result, err = runner.Run(t.Context(), trial.Task{Args: first.Args, Record: func(p trial.Probe) error {
		first.Probes = append(first.Probes, p)
		return nil
	}})
	if err != nil || !first.Met() {
		t.Fatalf("the first trial ended with %+v, %v", first.Result, err)
	}
	return f, studies.Study{Name: "small", Trials: []studies.Trial{first}}, profile
}

func mustLoad(t *testing.T, name string) *sim.Profile {
	t.Helper()
	p, err := sim.LoadProfile(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// One trial of a server with other constants is enough to predict where its capacity is high.
func TestPredictionsHaveTheShapeOfTheServer(t *testing.T) {
	realtime.Only(t, "simulates 48 whole searches")
	f, study, profile := open(t)
	got, err := f.Predict(t.Context(), study)
	if err != nil {
		t.Fatal(err)
	}
	if got.Profile != "small-fast" || got.Misfit > maxMisfit || len(got.Trials) < 12 {
		t.Fatalf("predicted %d points with %s, which misses by %.2f; want at least 12 with small-fast", len(got.Trials), got.Profile, got.Misfit)
	}
	points := make([]space.Point, len(got.Trials))
	for i, one := range got.Trials {
		points[i] = one.Point
	}
	truths, err := f.capacities(t.Context(), profile, points, 0)
	if err != nil {
		t.Fatal(err)
	}
	var predicted, true []float64
	for _, is := range truths {
		for _, said := range got.Trials {
			if said.Point.String() == is.Point.String() {
				predicted, true = append(predicted, math.Log(said.Result.Capacity.Rate)), append(true, math.Log(is.Result.Capacity.Rate))
			}
		}
	}
	if r := stat.Correlation(predicted, true, nil); r < 0.85 {
		t.Errorf("the correlation of predicted and true ln capacities is %.2f over %d points, want at least 0.85", r, len(true))
	}
	for _, one := range got.Trials {
		if one.Result.Capacity.RatioErr != got.Misfit || got.Misfit <= 0 {
			t.Errorf("the prediction for %v has a misfit of %g, want %g", one.Point, one.Result.Capacity.RatioErr, got.Misfit)
		}
		if err := studies.CheckPrior(one); err != nil || len(one.Probes) > 0 {
			t.Errorf("a prediction for %v has %d probes and cannot be stored: %v", one.Point, len(one.Probes), err)
		}
	}
}

// A server is never predicted with its own profile. A study without a comparable probe is not predicted at all.
func TestNothingIsPredictedFromNothing(t *testing.T) {
	f, study, _ := open(t)
	for _, p := range f.Profiles[:len(f.Profiles)-1] {
		if p.Name == mustLoad(t, "small-fast").Name {
			t.Errorf("the server is predicted with its own profile")
		}
	}
	study.Trials[0].Probes = nil
	if _, err := f.Predict(t.Context(), study); !errors.Is(err, ErrNothingMeasured) {
		t.Errorf("Predict without a probe says %v, want ErrNothingMeasured", err)
	}
}

// A server that no profile resembles is not predicted. Here each figure of the first trial is multiplied by another
// factor.
func TestAServerThatNoProfileResemblesIsNotPredicted(t *testing.T) {
	realtime.Only(t, "scales each profile")
	f, study, _ := open(t)
	for i := range study.Trials[0].Probes {
		m := &study.Trials[0].Probes[i].Measurement
		m.TTFT.P50, m.TTFT.P99, m.TPOT.P99 = 2*m.TTFT.P50, 0.7*m.TTFT.P99, 1.6*m.TPOT.P99
	}
	_, err := f.Predict(t.Context(), study)
	if misfit, ok := errors.AsType[*MisfitError](err); !ok || misfit.Misfit <= maxMisfit || !strings.Contains(err.Error(), "misses the measured latencies") {
		t.Errorf("Predict says %v, want a misfit above %g", err, maxMisfit)
	}
}

// Flags that the simulator does not model neither change nor prevent its predictions.
func TestUnknownFlagsAreLeftOut(t *testing.T) {
	f := forecaster(t)
	f.FixedArgs, f.points = append(f.FixedArgs, "--brand-new-flag", "3"), 0
	trials, err := f.capacities(t.Context(), mustLoad(t, "small-fast"), []space.Point{{}}, 0)
	if err != nil || len(trials) != 1 {
		t.Errorf("%d predictions with an unknown flag, %v; want one", len(trials), err)
	}
}

// After the points that fill the space, more points are predicted where the simulator finds the best capacities. Two runs
// predict the same.
func TestThePromisingPointsArePredicted(t *testing.T) {
	predict := func() []studies.Trial {
		f := forecaster(t)
		f.points = promisingPoints
		points, err := f.spread()
		if err != nil {
			t.Fatal(err)
		}
		trials, err := f.capacities(t.Context(), mustLoad(t, "small-fast"), points, 0)
		if err != nil {
			t.Fatal(err)
		}
		return trials
	}
	trials := predict()
	spread := trials[:len(trials)-promisingPoints]
	rate := func(t studies.Trial) float64 { return t.Result.Capacity.Rate }
	mean := func(all []studies.Trial) float64 { return lo.SumBy(all, rate) / float64(len(all)) }
	best := func(all []studies.Trial) float64 {
		return lo.Max(lo.Map(all, func(t studies.Trial, _ int) float64 { return rate(t) }))
	}
	if promising := trials[len(spread):]; len(spread) < promisingPoints/2 || mean(promising) <= mean(spread) || best(promising) < 0.98*best(spread) {
		t.Errorf("%d points that fill the space carry %.3g req/s, at most %.3g; %d promising ones carry %.3g, at most %.3g",
			len(spread), mean(spread), best(spread), len(promising), mean(promising), best(promising))
	}
	for i, again := range predict() {
		if again.Point.String() != trials[i].Point.String() || rate(again) != rate(trials[i]) {
			t.Errorf("prediction %d is %s with %g req/s, and the second time %s with %g", i, trials[i].Point, rate(trials[i]), again.Point, rate(again))
		}
	}
}

// If the simulator finds no capacity for a study, there are no predictions, and the error says why.
func TestNoPredictionHasAReason(t *testing.T) {
	realtime.Only(t, "scales two profiles")
	f, study, _ := open(t)
	f.points = 4
	runner := f.Runner
	f.Runner = func() *trial.Runner {
		r := runner()
		r.SLO.Limits = slices.Clone(r.SLO.Limits)
		r.SLO.Limits[1].Max = time.Microsecond // no server generates a token in this time
		return r
	}
	if got, err := f.Predict(t.Context(), study); err == nil || !strings.Contains(err.Error(), "no point runs and keeps the SLO") {
		t.Errorf("%d predictions, %v; want a reason", len(got.Trials), err)
	}
}
