package tuner

import (
	"math"
	"slices"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// found returns a finished trial with a capacity.
func found(number int, origin studies.Origin, point space.Point, rate float64) studies.Trial {
	return studies.Trial{Number: number, Origin: origin, Point: point, State: studies.Done,
		Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, Bound: capacity.AtLeast}}}
}

func elsewhere(source string, seqs string, rate float64) studies.Trial {
	t := found(-1, studies.Prior, space.Point{"max-num-seqs": seqs}, rate)
	t.Source = source
	return t
}

// A recorder is a sampler that records the history of its last call.
type recorder struct{ history []studies.Trial }

func (r *recorder) Next(_ int, history []studies.Trial) (space.Point, error) {
	r.history = history
	return space.Point{"max-num-seqs": "7"}, nil
}

// The best point of each source gets a trial. These trials come after the default and the current args, and before the
// points of the sampler.
func TestTheBestPriorIsMeasuredEarly(t *testing.T) {
	chooser := &recorder{}
	s := &Study{Space: smallSpace(t), Sampler: chooser, Current: space.Point{"max-num-seqs": "32"}}
	history := studies.Study{Prior: []studies.Trial{
		elsewhere("a", "8", 10), elsewhere("a", "16", 30), elsewhere("a", "4096", 90), // the last point is outside the space
		elsewhere("b", "32", 5), elsewhere("b", "4", 3),
		elsewhere("c", "12", 40),
	}}
	var origins []studies.Origin
	var points []string
	for n := range 6 {
		next, err := s.nextTrial(history)
		if err != nil {
			t.Fatal(err)
		}
		origins, points = append(origins, next.Origin), append(points, next.Point.String())
		next.State, next.Result = studies.Done, found(n, "", nil, 2).Result
		if n == 3 { // the point was not the reason of this failure, so it is measured again
			next.Result = trial.Result{Outcome: trial.Unknown}
		}
		history.Trials = append(history.Trials, next)
	}
	if want := []studies.Origin{studies.Default, studies.Current, studies.Prior, studies.Prior, studies.Prior, studies.Sampled}; !slices.Equal(origins, want) {
		t.Errorf("origins %q, want %q", origins, want)
	}
	// The best point of source b is not measured again: it is the user's current args.
	if want := []string{"", "max-num-seqs=32", "max-num-seqs=16", "max-num-seqs=12", "max-num-seqs=12", "max-num-seqs=7"}; !slices.Equal(points, want) {
		t.Errorf("points %q, want %q", points, want)
	}
	if got := chooser.history; len(got) == 0 || got[0].Number >= 0 || got[len(got)-1].Number != 4 {
		t.Errorf("the sampler's history is %+v, want priors and then the trials", got)
	}
}

func TestPriorsAreBroughtToOurScale(t *testing.T) {
	for _, c := range []struct {
		name   string
		trials []studies.Trial
		want   []float64 // expected capacities of the priors in the history
	}{
		{"nothing is measured here: as they are", nil, []float64{10, 20, 40}},
		{"no point is shared: the best are equal", []studies.Trial{found(0, studies.Default, space.Point{}, 4)}, []float64{1, 2, 4}},
		{"one point is shared: its ratio holds for all, and ours stands for it", []studies.Trial{found(0, studies.Prior, space.Point{"max-num-seqs": "16"}, 10)}, []float64{2.5, 5}},
		{"two are shared: the mean of their logarithms", []studies.Trial{found(0, studies.Sampled, space.Point{"max-num-seqs": "8"}, 8),
			found(1, studies.Prior, space.Point{"max-num-seqs": "16"}, 8)}, []float64{20 * math.Sqrt(0.8*0.2)}},
		{"a shared point that failed here says nothing of the scale", []studies.Trial{
			{Point: space.Point{"max-num-seqs": "16"}, State: studies.Done, Result: trial.Result{Outcome: trial.Infeasible}}}, []float64{10, 20}},
	} {
		study := studies.Study{Trials: c.trials, Prior: []studies.Trial{elsewhere("a", "8", 10), elsewhere("a", "12", 20), elsewhere("a", "16", 40)}}
		all := history(study)
		priors := all[:len(all)-len(c.trials)]
		if len(priors) != len(c.want) {
			t.Errorf("%s: %d priors, want %d", c.name, len(priors), len(c.want))
			continue
		}
		for i, p := range priors {
			if got := p.Result.Capacity.Rate; math.Abs(got-c.want[i]) > 1e-9 {
				t.Errorf("%s: prior %d has %g, want %g", c.name, i, got, c.want[i])
			}
		}
		if study.Prior[0].Result.Capacity.Rate != 10 {
			t.Errorf("%s: what is stored has changed", c.name)
		}
	}
}

func TestHint(t *testing.T) {
	measured := elsewhere("a", "8", 12)
	measured.Probes = []trial.Probe{{Rate: 12}}
	other := found(0, "", nil, 9)
	other.Version = "0.33.0"
	for _, c := range []struct {
		name  string
		study studies.Study
		want  float64
	}{
		{"nothing is known", studies.Study{}, 0},
		{"the lowest of rates that were offered elsewhere", studies.Study{Prior: []studies.Trial{elsewhere("b", "8", 3000), measured, elsewhere("b", "8", 1)}}, 12},
		{"our own best", studies.Study{Prior: []studies.Trial{measured}, Trials: []studies.Trial{found(0, "", nil, 4), found(1, "", nil, 3)}}, 4},
		{"but not of another version", studies.Study{Trials: []studies.Trial{other, found(1, "", nil, 3)}}, 3},
	} {
		if got := hint(c.study, &studies.Trial{}); got != c.want {
			t.Errorf("%s: %g, want %g", c.name, got, c.want)
		}
	}
}

// Priors (imported or predicted results) are not trials: they do not count towards the budget. The best prior is
// measured.
func TestAStudyWithPriors(t *testing.T) {
	store := open(t, t.TempDir())
	priors := []studies.Trial{elsewhere("", "8", 10), elsewhere("", "16", 30), elsewhere("", "9", 20)}
	if err := store.AddPriors([]studies.Source{{Path: "a", Trials: priors}}); err != nil {
		t.Fatal(err)
	}
	const trials = 4
	s := study(t, store, trial.Reset, trials)
	mustRun(t, s)
	got, err := store.Study()
	if err != nil || len(got.Trials) != trials || len(got.Prior) != 3 || got.Prior[1].Source != "a" {
		t.Fatalf("%d trials and the priors %+v, %v", len(got.Trials), got.Prior, err)
	}
	if third := got.Trials[2]; third.Origin != studies.Prior || third.Point.String() != "max-num-seqs=16" || len(third.Probes) == 0 {
		t.Errorf("trial 2 is %+v, want the best prior point", third)
	}
}
