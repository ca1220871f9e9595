package tuner

import (
	"context"
	"errors"
	"math"
	"strconv"
	"testing"
	"time"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// predicting returns a study with predictions, and a count of the calls of Predict.
func predicting(t *testing.T, store Store, trials int) (*Study, *int) {
	t.Helper()
	s := racing(t, store, trials)
	var err error
	if s.Sampler, err = sampler.New("gp", s.Space, 1, trials); err != nil {
		t.Fatal(err)
	}
	calls := new(int)
	s.Predict = func(context.Context, studies.Study) ([]studies.Trial, string, error) {
		*calls++
		var all []studies.Trial
		for i := range 20 {
			p := space.Point{
				"gpu-memory-utilization": strconv.FormatFloat(0.5+0.02*float64(i), 'f', 2, 64), "max-num-seqs": strconv.Itoa(4 + 3*i),
				"max-num-batched-tokens": strconv.Itoa(300 + 150*i),
			}
			rate := 30 * math.Exp(-math.Abs(float64(i-12))/9)
			all = append(all, studies.Trial{Number: -1, Origin: studies.Prior, State: studies.Done, Point: p, Result: trial.Result{
				Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, High: rate, Bound: capacity.Exact, StdErr: 0.05},
			}})
		}
		return all, "predicted", nil
	}
	return s, calls
}

// The space is predicted once, after the first measured trial. The point with the best prediction is measured next.
func TestTheSpaceIsPredictedOnce(t *testing.T) {
	store := open(t, t.TempDir())
	s, calls := predicting(t, store, 5)
	s.Presets = false
	mustRun(t, s)
	got := stored(t, store)
	if *calls != 1 || len(got.Prior) != 20 {
		t.Fatalf("%d calls and %d predictions, want one call and 20", *calls, len(got.Prior))
	}
	if prior := got.Trials[2]; prior.Origin != studies.Prior || prior.Point["max-num-seqs"] != "40" {
		t.Errorf("trial 2 is %s at %v, want the best prediction, with 40 sequences", prior.Origin, prior.Point)
	}
}

// Predict reads the first measured trials with all probes, even if they do not meet the SLO.
func TestPredictReadsTheProbesOfLosers(t *testing.T) {
	s, _ := predicting(t, open(t, t.TempDir()), 4)
	s.Runner.SLO.Limits[1].Max = time.Microsecond // no server generates a token in this time
	probes := 0
	s.Predict = func(_ context.Context, study studies.Study) ([]studies.Trial, string, error) {
		for _, one := range study.Trials {
			probes += len(one.Probes)
		}
		return nil, "", errors.New("nothing to compare")
	}
	mustRun(t, s)
	if probes == 0 {
		t.Error("Predict got trials without probes")
	}
}

// In a new world the predictions for the old world are dropped, and the points are predicted again.
func TestPredictionsBelongToAWorld(t *testing.T) {
	s := &Study{Predict: func(context.Context, studies.Study) ([]studies.Trial, string, error) { return nil, "", nil }}
	old := found(-1, studies.Prior, space.Point{"max-num-seqs": "8"}, 3)
	old.PredictedFor = 1
	imported := elsewhere("a", "8", 10)
	study := studies.Study{Prior: []studies.Trial{old, imported}, Trials: []studies.Trial{found(0, studies.Default, space.Point{}, 2)}}
	if got := s.withoutOldPredictions(study); len(got.Prior) != 2 || predictions(got) != 1 {
		t.Errorf("in the first world %d priors remain and %d predictions count, want 2 and 1", len(got.Prior), predictions(got))
	}
	study.Events = append(study.Events, studies.Event{Kind: studies.Drift, Trial: 1, Changes: studies.Changes{{Fact: "workload", Was: new("a"), Is: new("b")}}})
	if got := s.withoutOldPredictions(study); len(got.Prior) != 1 || got.Prior[0].Source != "a" || predictions(got) != 0 {
		t.Errorf("in the second world %d priors remain and %d predictions count, want the imported one and 0", len(got.Prior), predictions(got))
	}
	s.Predict = nil
	if got := s.withoutOldPredictions(studies.Study{Prior: []studies.Trial{old, imported}}); len(got.Prior) != 1 {
		t.Errorf("without predictions %d priors remain, want the imported one", len(got.Prior))
	}
}

// A prediction ends when the user ends the study, and the resumed study predicts.
func TestAPredictionIsInterrupted(t *testing.T) {
	dir := t.TempDir()
	store := open(t, dir)
	s, _ := predicting(t, store, 4)
	finish := make(chan struct{})
	s.Finish = finish
	s.Predict = func(ctx context.Context, _ studies.Study) ([]studies.Trial, string, error) {
		close(finish)
		<-ctx.Done()
		return nil, "", ctx.Err()
	}
	if _, err := s.Run(t.Context()); !errors.Is(err, trial.ErrInterrupted) {
		t.Fatalf("the study ended with %v, want ErrInterrupted", err)
	}
	again, calls := predicting(t, store, 4)
	mustRun(t, again)
	if *calls != 1 || len(stored(t, store).Prior) != 20 {
		t.Errorf("after the interruption: %d calls, %d predictions", *calls, len(stored(t, store).Prior))
	}
}

// A study whose space cannot be predicted continues without predictions, says so, and does not try again after each
// trial.
func TestAStudyGoesOnWithoutPredictions(t *testing.T) {
	store := open(t, t.TempDir())
	s, _ := predicting(t, store, 6)
	calls, said := 0, 0
	s.Predict = func(context.Context, studies.Study) ([]studies.Trial, string, error) {
		calls++
		return nil, "", errors.New("nothing to compare")
	}
	s.Observe = func(e Event) {
		if e.Kind == Remark && e.Step == "the simulator predicts nothing: nothing to compare" {
			said++
		}
	}
	mustRun(t, s)
	if calls != maxScaled || said != calls {
		t.Errorf("%d calls of Predict, and it was said %d times; want %d", calls, said, maxScaled)
	}
}
