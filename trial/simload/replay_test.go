package simload

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A replay on the same server repeats the probes of a search to the last digit, including those that ended early. A replay on another
// server sends the same requests.
func TestReplayRepeatsATrial(t *testing.T) {
	requests := source(t, workload.Spec{Kind: "random", InputTokens: 200, OutputTokens: 30, Requests: 80}, 1)
	for _, protocol := range []trial.Protocol{trial.Reset, trial.Primed, trial.Steady} {
		r := trial.Runner{
			Start: rig(t).Start, Source: requests, Cache: protocol, Seed: 2,
			SLO:     slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: 60 * time.Millisecond}}},
			Lengths: trial.Lengths{LeadIn: time.Second, Window: 3 * time.Second, MinRequests: 120},
			Search:  capacity.Search{Hint: 20, Min: 1, Max: 400, Factor: 1.6, Tolerance: 0.2, MaxProbes: 6},
		}
		task := trial.Task{Number: 3, Args: strings.Fields("--max-num-seqs 16 --max-model-len 2048")}
		var was []trial.Probe
		task.Record = func(p trial.Probe) error { was = append(was, p); return nil }
		if _, err := r.Run(t.Context(), task); err != nil {
			t.Fatal(err)
		}
		stopped := 0
		for _, p := range was {
			if p.Stopped {
				stopped++
			}
		}
		if len(was) < 3 || stopped == 0 {
			t.Fatalf("%s: %d probes, and %d of them ended early; want at least 3 probes and at least 1 early end", protocol, len(was), stopped)
		}
		task.Done, task.Record = was, nil
		again, err := r.Replay(t.Context(), task)
		if err != nil || !reflect.DeepEqual(again, was) {
			t.Errorf("%s: Replay = %+v, %v\nwant\n%+v", protocol, again, err, was)
		}
		slow := *rig(t).Profile
		slow.Step.Weights *= 2
		r.Start = (&Rig{Profile: &slow, ITL: true}).Start
		other, err := r.Replay(t.Context(), task)
		if err != nil || len(other) != len(was) {
			t.Fatalf("%s: on another server Replay gives %d probes, %v; want %d", protocol, len(other), err, len(was))
		}
		for i, p := range other {
			whole := !was[i].Stopped
			if p.Rate != was[i].Rate || p.Stopped == whole || whole && (p.Measurement.PromptTokens != was[i].Measurement.PromptTokens || p.Measurement.TPOT.P50 <= was[i].Measurement.TPOT.P50) {
				t.Errorf("%s: on a slower server probe %d is %+v, want the same requests, slower", protocol, i, p.Measurement)
			}
		}
	}
}

func TestReplayOfAServerThatDoesNotStart(t *testing.T) {
	r := trial.Runner{Start: (&Rig{Profile: new(sim.Profile)}).Start}
	if probes, err := r.Replay(t.Context(), trial.Task{Done: []trial.Probe{{Rate: 1}}}); err == nil || probes != nil {
		t.Errorf("Replay = %v, %v; want the start's error", probes, err)
	}
}
