package forecast

import (
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// The simulator models no variable, so the point with the best prediction is measured without variables.
func TestTheBestPredictionHasNoVariables(t *testing.T) {
	s, err := space.New([]space.Parameter{
		{Name: "max-num-seqs", Kind: space.Int, Min: 1, Max: 64},
		{Name: "OMP_NUM_THREADS", Kind: space.Int, Min: 1, Max: 8},
		{Name: "max-num-batched-tokens", Kind: space.Int, Min: 64, Max: 128, When: "OMP_NUM_THREADS > 4"},
	}, nil, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	predicted := func(rate float64, p space.Point) studies.Trial {
		return studies.Trial{Number: -1, Point: p, Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate}}}
	}
	f := &Forecaster{Space: s}
	all := f.withPlainBest([]studies.Trial{predicted(1, space.Point{}), predicted(3, space.Point{"max-num-seqs": "8", "OMP_NUM_THREADS": "2"})})
	if len(all) != 3 || all[0].Point.String() != "max-num-seqs=8" || all[0].Result.Capacity.Rate != 3 || all[2].Point["OMP_NUM_THREADS"] != "2" {
		t.Errorf("the predictions are %+v", all)
	}
	onlyWith := []studies.Trial{predicted(3, space.Point{"OMP_NUM_THREADS": "8", "max-num-batched-tokens": "64"})}
	if all := f.withPlainBest(onlyWith); len(all) != 1 {
		t.Errorf("a flag that needs a variable is predicted without it: %+v", all)
	}
}
