package main

import (
	"strings"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// The best capacity so far is shown as the study's objective counts it.
func TestProgressCountsAsTheObjectiveDoes(t *testing.T) {
	measured := trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: 6, Bound: capacity.Exact}}
	s := studies.Study{Trials: []studies.Trial{{State: studies.Done, Args: []string{"--tensor-parallel-size", "4"}, Result: measured}}}
	for objective, want := range map[studies.Objective]string{
		studies.TotalCapacity:  "going on: 1 of 3 trials done, best so far 6 req/s\n",
		studies.CapacityPerGPU: "going on: 1 of 3 trials done, best so far 1.5 req/s per GPU\n",
	} {
		s.World = map[string]string{studies.ObjectiveKey: string(objective)}
		var out strings.Builder
		newProgress(&out, s, nil, 3)
		if !strings.HasSuffix(out.String(), want) {
			t.Errorf("%s: the progress begins with %q, want %q at its end", objective, &out, want)
		}
	}
}
