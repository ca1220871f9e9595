package metrics

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner"
)

func TestServeShowsTheStudy(t *testing.T) {
	socket, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := Serve(socket, "llama", 30, studies.CapacityPerGPU)
	done := func(number int, rate float64) studies.Trial {
		result := trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Bound: capacity.Exact}, GPUTime: 10e9}
		return studies.Trial{Number: number, State: studies.Done, Args: []string{"--tensor-parallel-size", "2"}, Result: result}
	}
	s.Resume(studies.Study{Trials: []studies.Trial{done(0, 2)}})
	s.Watch(tuner.Event{Kind: tuner.Ended, Trial: done(1, 3.5), Best: true})
	s.Watch(tuner.Event{Kind: tuner.Ended, Trial: done(2, 3)})
	s.Watch(tuner.Event{Kind: tuner.Began, Trial: studies.Trial{Number: 3}})
	s.Watch(tuner.Event{Kind: tuner.Probed, Probe: &trial.Probe{Rate: 4}})
	if text := get(t, "http://"+s.Address.String()+"/healthz"); text != "ok\n" {
		t.Errorf("/healthz answers %q", text)
	}
	text := get(t, "http://"+s.Address.String()+"/metrics")
	for _, want := range []string{
		`tuner_trials_budget{study="llama"} 30`, `tuner_trial{study="llama"} 3`, `tuner_trial_probes{study="llama"} 1`, `tuner_probe_rate{study="llama"} 4`,
		`tuner_incumbent_capacity{study="llama"} 1.75`, `tuner_incumbent_trial{study="llama"} 1`,
		`tuner_trials_total{outcome="measured",study="llama"} 3`, `tuner_gpu_seconds_total{study="llama"} 30`,
	} {
		if !strings.Contains(text, "\n"+want+"\n") {
			t.Errorf("/metrics lacks %s:\n%s", want, text)
		}
	}
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	answer, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
