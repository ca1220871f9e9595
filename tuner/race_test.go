package tuner

import (
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// racing returns a study whose trials race against the best point so far. It confirms its best point and the default.
func racing(t *testing.T, store Store, trials int) *Study {
	t.Helper()
	s := study(t, store, trial.Reset, trials)
	s.Presets, s.Confirm, s.Budget.MinGain = true, 1, 0.01
	s.Runner.Search.Race.MinGain = 0.01
	s.Runner.Confirm = trial.Lengths{LeadIn: 2 * time.Second, Window: 10 * time.Second, MinRequests: 100}
	return s
}

// A study measures the default in full, and all other points race against the best one. It confirms the best point and
// the default with new requests and longer probes.
func TestAStudyRacesAndConfirms(t *testing.T) {
	store := open(t, t.TempDir())
	mustRun(t, racing(t, store, 6))
	trials := stored(t, store).Trials
	var origins []string
	for _, one := range trials {
		origins = append(origins, string(one.Origin))
		c := one.Result.Capacity
		if raced := one.Result.Class == serverctl.DroppedByRace; raced && (one.Met() || c.Met() || !strings.HasPrefix(c.Why, "lost the race")) {
			t.Errorf("trial %d lost the race, and has %+v", one.Number, c)
		}
	}
	want := "default current preset sampler sampler sampler confirm"
	if len(trials[6].Point) > 0 {
		want += " confirm" // the default, which is confirmed in any case
	}
	if got := strings.Join(origins, " "); got != want {
		t.Fatalf("the trials are %q, want %q", got, want)
	}
	first, last := trials[6], trials[len(trials)-1]
	if len(last.Point) != 0 {
		t.Errorf("confirmed %v and %v, want the best and the default", first.Point, last.Point)
	}
	for _, p := range first.Probes {
		if p.Measurement.Window < 10*time.Second {
			t.Errorf("a confirming probe has a window of %s, want at least 10 s", p.Measurement.Window)
		}
	}
}

// A study exceeds its GPU time by at most one probe, and confirms nothing after that.
func TestGPUTimeBoundsAStudy(t *testing.T) {
	full := open(t, t.TempDir())
	mustRun(t, racing(t, full, 5))
	var all, longest time.Duration
	for _, one := range stored(t, full).Trials {
		all += one.Result.GPUTime
		for _, p := range one.Probes {
			longest = max(longest, p.GPUTime)
		}
	}
	for part := time.Duration(3); part <= 7; part += 4 {
		s := racing(t, open(t, t.TempDir()), 5)
		s.Budget.GPUTime = all * part / 10
		end, err := s.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		history, err := s.Store.History(Compared)
		if err != nil {
			t.Fatal(err)
		}
		start := history.Trials[len(history.Trials)-1].Result.Facts.StartUp
		if used := spent(history); used > s.Budget.GPUTime+longest+start+30*time.Second || !end.Spent && !strings.Contains(end.Why, "budget.trials") {
			t.Errorf("with %s the study took %s (%+v), want at most one start and one probe (%s) more", s.Budget.GPUTime, used, end, longest)
		}
	}
}

// Once the median trial is known, a trial costs at most a multiple of it.
func TestATrialHasABudget(t *testing.T) {
	done := func(took time.Duration) studies.Trial {
		return studies.Trial{State: studies.Done, Result: trial.Result{Outcome: trial.Measured, GPUTime: took}}
	}
	for _, row := range []struct {
		name    string
		trials  []studies.Trial
		gpuTime time.Duration
		origin  studies.Origin
		want    time.Duration
	}{
		{"nothing is known", nil, 0, studies.Default, unpricedTrial},
		{"a few trials", []studies.Trial{done(time.Hour), done(time.Minute), done(5 * time.Minute)}, 0, studies.Sampled, 25 * time.Minute},
		{"crashes are no price", []studies.Trial{{State: studies.Done, Result: trial.Result{Outcome: trial.Infeasible, GPUTime: time.Second}}}, 0, studies.Sampled, unpricedTrial},
		{"little is left", []studies.Trial{done(50 * time.Minute)}, time.Hour, studies.Sampled, 10 * time.Minute},
		{"nothing is left", []studies.Trial{done(2 * time.Hour)}, time.Hour, studies.Sampled, time.Second},
		{"a confirmation has longer probes", []studies.Trial{done(time.Minute), done(time.Minute), done(time.Minute)}, 0, studies.Confirmed, unpricedTrial},
	} {
		for i := range row.trials {
			row.trials[i].Number = i
		}
		s := &Study{Budget: Budget{GPUTime: row.gpuTime}}
		if got := s.trialBudget(studies.Study{Trials: row.trials}, row.origin); got != row.want {
			t.Errorf("%s: the trial may take %s, want %s", row.name, got, row.want)
		}
	}
}

// presetPoints moves the presets to legal points of any space. A preset without a usable value gives no point.
func TestPresetsFitTheSpace(t *testing.T) {
	for _, row := range []struct {
		name       string
		parameters []space.Parameter
		want       []string
	}{
		{"all flags", []space.Parameter{
			{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.8, Max: 0.97, Step: 0.01},
			{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 1024, Log: true},
			{Name: "max-num-batched-tokens", Kind: space.Int, Min: 1024, Max: 32768, Log: true},
		}, []string{"gpu-memory-utilization=0.95 max-num-batched-tokens=8192 max-num-seqs=128"}},
		{"a range that ends below", []space.Parameter{
			{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.5, Max: 0.9, Step: 0.01},
			{Name: "max-num-seqs", Kind: space.Int, Min: 16, Max: 64},
		}, []string{"gpu-memory-utilization=0.9 max-num-seqs=64"}},
		{"choices without the preset's", []space.Parameter{{Name: "max-num-seqs", Kind: space.Categorical, Choices: []string{"7", "9"}}}, nil},
		{"no flag of a preset", []space.Parameter{{Name: "block-size", Kind: space.Int, Min: 8, Max: 32}}, nil},
	} {
		s, err := space.New(row.parameters, nil, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, p := range presetPoints(s, presets) {
			if name := p.String(); !slices.Contains(got, name) {
				got = append(got, name)
			}
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("%s: presets %v, want %v", row.name, got, row.want)
		}
	}
}

// If a preset runs out of memory, a smaller one follows. If it runs, or fails otherwise, none does.
func TestASmallPresetFollowsOneThatRanOutOfMemory(t *testing.T) {
	of, err := space.New([]space.Parameter{
		{Name: "gpu-memory-utilization", Kind: space.Float, Min: 0.5, Max: 0.97, Step: 0.01},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 512, Max: 32768, Log: true},
	}, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &Study{Space: of, Presets: true}
	first := s.untriedPreset(studies.Study{})
	for _, row := range []struct {
		result trial.Result
		want   string
	}{
		{trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMStart}, "gpu-memory-utilization=0.92 max-num-batched-tokens=2048"},
		{trial.Result{Outcome: trial.Infeasible, Class: serverctl.OOMLoad}, "gpu-memory-utilization=0.92 max-num-batched-tokens=2048"},
		{trial.Result{Outcome: trial.Infeasible, Class: serverctl.KVTooSmall}, ""},
		{trial.Result{Outcome: trial.Infeasible, Class: serverctl.StartCrash}, ""},
		{trial.Result{Outcome: trial.Measured}, ""},
	} {
		tried := []studies.Trial{{Origin: studies.Preset, State: studies.Done, Point: first, Result: row.result}}
		second := s.untriedPreset(studies.Study{Trials: tried})
		if second.String() != row.want {
			t.Errorf("after a preset that ended %s (%s), the next is %q, want %q", row.result.Outcome, row.result.Class, second, row.want)
		}
		tried = append(tried, studies.Trial{Origin: studies.Preset, State: studies.Done, Point: second, Result: row.result})
		if second != nil && s.untriedPreset(studies.Study{Trials: tried}) != nil {
			t.Error("a third preset follows")
		}
	}
}

// If three draft tokens carried less than none, one draft token follows. If they carried more, or did not run, none does.
func TestOneDraftTokenFollowsThreeThatLost(t *testing.T) {
	of, err := space.New([]space.Parameter{{Name: space.SpeculativeTokens, Kind: space.Int, Min: 0, Max: 5}}, nil, map[string]any{"method": "ngram"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	s := &Study{Space: of, Presets: true}
	at := func(o trial.Outcome, rate float64) trial.Result {
		return trial.Result{Outcome: o, Capacity: capacity.Capacity{Rate: rate}}
	}
	for _, row := range []struct {
		name          string
		none, drafted trial.Result
		want          string
	}{
		{"three lost the race", at(trial.Measured, 2), at(trial.Dropped, 1.5), "1"},
		{"three carried less", at(trial.Measured, 2), at(trial.Measured, 1.9), "1"},
		{"three carried more", at(trial.Measured, 2), at(trial.Measured, 2.1), ""},
		{"three did not run", at(trial.Measured, 2), at(trial.Infeasible, 0), ""},
	} {
		tried := []studies.Trial{
			{Origin: studies.Preset, State: studies.Done, Point: space.Point{space.SpeculativeTokens: "0"}, Result: row.none},
			{Origin: studies.Preset, State: studies.Done, Point: space.Point{space.SpeculativeTokens: "3"}, Result: row.drafted},
		}
		if next := s.untriedPreset(studies.Study{Trials: tried}); next[space.SpeculativeTokens] != row.want {
			t.Errorf("%s: the next preset has %q draft tokens, want %q", row.name, next[space.SpeculativeTokens], row.want)
		}
	}
}

// The incumbent is never a trial that lost the race, nor a confirmation.
func TestOnlyTheSearchHasAnIncumbent(t *testing.T) {
	of := func(number int, origin studies.Origin, outcome trial.Outcome, bound capacity.Bound, rate float64) studies.Trial {
		return studies.Trial{Number: number, Origin: origin, State: studies.Done, Result: trial.Result{
			Outcome: outcome, Capacity: capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: bound},
		}}
	}
	best, found := Incumbent(studies.Study{Trials: []studies.Trial{
		of(0, studies.Default, trial.Measured, capacity.Exact, 2), of(1, studies.Sampled, trial.Dropped, capacity.Estimated, 9),
		of(2, studies.Sampled, trial.Measured, capacity.Exact, 3), of(3, studies.Confirmed, trial.Measured, capacity.Exact, 8),
	}})
	if !found || best.Number != 2 {
		t.Errorf("the incumbent is trial %d, want 2", best.Number)
	}
}

// A study in which no point keeps the SLO ends after a few points, and each of these points costs little.
func TestAHopelessStudyEndsEarly(t *testing.T) {
	store := open(t, t.TempDir())
	s := racing(t, store, 30)
	s.Runner.SLO.Limits[1].Max = time.Microsecond // no server generates a token in this time
	end, err := s.Run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	trials := stored(t, store).Trials
	measured := 0
	for _, one := range trials {
		if one.Result.Outcome == trial.Measured {
			measured++
		}
	}
	if measured != maxHopeless || !strings.Contains(end.Why, "keeps the SLO at any rate") {
		t.Errorf("the study ended after %d measured trials: %+v; want %d", measured, end, maxHopeless)
	}
	for i, one := range trials {
		if most := map[bool]int{true: maxFails, false: maxFailsAgain}[i == 0]; len(one.Probes) > most {
			t.Errorf("trial %d has %d probes, want at most %d", i, len(one.Probes), most)
		}
	}
}
