package main

import (
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A run that is void says nothing of the load generator, and one whose requests all failed nothing of a latency.
func TestASweepBlamesNeitherClientNorLatency(t *testing.T) {
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 95, Max: time.Second}}}
	failed := limits.Judge([]bench.Sample{{Failure: bench.Status, End: 1}}, 1, time.Second)
	for _, row := range []struct {
		name      string
		result    benchResult
		want, not string
	}{
		{"void", benchResult{m: bench.Measurement{Completed: 1, Void: "not streamed"}}, "not decided at 10 (the run is void)", "client"},
		{"all failed", benchResult{m: bench.Measurement{Failed: 1}, verdict: &failed}, "failed at the lowest load, 10, by error rate", "TTFT"},
	} {
		text := highestText([]capacity.Step{{Rate: 10, Outcome: row.result.outcome()}}, false)
		if !strings.Contains(text, row.want) || strings.Contains(text, row.not) {
			t.Errorf("%s: %q, want %q and nothing of %q", row.name, text, row.want, row.not)
		}
	}
}

// Where failed requests decide, a request alone would fail as well: no limit on a latency is to be raised.
func TestFailuresAreNamedWhereTheyDecide(t *testing.T) {
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 95, Max: time.Second}}}
	samples := make([]bench.Sample, 40)
	for i := range samples {
		samples[i] = bench.Sample{Sent: 1, First: 2, Last: 3, End: 3, OutputTokens: 1, WantTokens: 1}
	}
	if text := failing(limits.Judge(samples, 40, time.Second)); text != "" {
		t.Errorf("without failures it says %q", text)
	}
	samples[0].Failure = bench.TimedOut
	if text := failing(limits.Judge(samples, 40, time.Second)); text != "1 of 40 requests failed" {
		t.Errorf("one failure of 40 that none may be: %q", text)
	}
}

// The details of many failures are not kept, so the first that has one is told.
func TestTheFirstFailureIsToldWithItsDetail(t *testing.T) {
	b := &benching{client: &bench.Client{}}
	samples := []bench.Sample{{Failure: bench.TimedOut, End: 9}, {Failure: bench.TimedOut, Detail: "no byte came for 8s", End: 8}}
	notes := b.notes(benchResult{}, bench.Run{Samples: samples})
	if len(notes) != 1 || notes[0] != "first failure, timed-out: no byte came for 8s" {
		t.Errorf("notes are %q", notes)
	}
	stopped := b.notes(benchResult{stopped: true}, bench.Run{})
	if len(stopped) != 1 || !strings.HasSuffix(stopped[0], "none was completed") {
		t.Errorf("notes of a run that ended before an answer are %q", stopped)
	}
}
