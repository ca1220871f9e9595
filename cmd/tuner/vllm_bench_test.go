//go:build vllm && linux

package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// The load with which the winner is measured again by both tools.
const (
	compareRounds  = 3 // the median is taken: one disturbance on a shared machine moves a p99 by more than the band
	compareSeconds = 15
	compareLeast   = 300 // requests
)

// A benchRow is what the two tools are compared by.
type benchRow struct {
	TokensPerSecond float64 `json:"output_throughput"`
	MedianTPOT      float64 `json:"median_tpot_ms"`
	P99TTFT         float64 `json:"p99_ttft_ms"`
	Completed       int     `json:"completed"`
}

func (r benchRow) String() string {
	return fmt.Sprintf("%5d requests  %8.1f tok/s  median TPOT %6.3f ms  p99 TTFT %7.2f ms", r.Completed, r.TokensPerSecond, r.MedianTPOT, r.P99TTFT)
}

// compareWinner starts the winner by hand and sends it the same load from vllm bench serve and from tuner bench: Poisson
// arrivals at the highest rate that passed, lengths from the same distribution, greedy answers of pinned length. Each
// round has new draws, so that no prompt is in the prefix cache, and the tools take turns in going first.
//
// vllm bench serve stretches its arrivals until the last one is due at N/rate (vllm/benchmarks/serve.py, get_request). Its
// rate is therefore set to N/window of the tuner's own draw, where N requests are due in exactly that window.
func (s *tinyRun) compareWinner(t *testing.T) {
	var best tinyBest
	if !s.read(t, &best, "best", "tiny") || !best.Met {
		t.Fatal("tuner best names no winner")
	}
	rate := best.Best.Capacity.Low
	t.Logf("winner: trial %d at %g req/s: %q", best.Best.Number, rate, best.Best.Args)
	url, server := s.rig.serve(t, filepath.Join(s.dir, "winner.log"), best.Best.Args)
	defer server.stop()

	var ours, theirs []benchRow
	for round := range compareRounds {
		seed := uint64(round + 1)
		n, window := workload.Plan{Seed: seed, Rate: rate, Window: compareSeconds * time.Second, MinRequests: compareLeast}.Counted()
		tools := []func(){
			func() { ours = append(ours, s.tunerBench(t, url, rate, seed)) },
			func() { theirs = append(theirs, s.vllmBench(t, url, n, float64(n)/window.Seconds(), seed)) },
		}
		if round%2 == 1 {
			slices.Reverse(tools)
		}
		for _, run := range tools {
			run()
		}
		t.Logf("round %d  tuner bench       %v", round+1, ours[round])
		t.Logf("round %d  vllm bench serve  %v", round+1, theirs[round])
		if ours[round].Completed != n || theirs[round].Completed != n {
			t.Errorf("round %d: %d and %d requests completed, want %d", round+1, ours[round].Completed, theirs[round].Completed, n)
		}
	}
	o, v := medianRow(ours), medianRow(theirs)
	t.Logf("medians  tuner bench       %v", o)
	t.Logf("medians  vllm bench serve  %v", v)
	checkNear(t, "output tok/s", o.TokensPerSecond, v.TokensPerSecond, 0.03*v.TokensPerSecond)
	checkNear(t, "median TPOT (ms)", o.MedianTPOT, v.MedianTPOT, 0.10*v.MedianTPOT)
	checkNear(t, "p99 TTFT (ms)", o.P99TTFT, v.P99TTFT, max(25, 0.25*v.P99TTFT))
}

func checkNear(t *testing.T, what string, ours, theirs, band float64) {
	t.Helper()
	if !(math.Abs(ours-theirs) <= band) {
		t.Errorf("%s: tuner bench says %.3f, vllm bench serve %.3f: want them within %.3f", what, ours, theirs, band)
	}
}

// medianRow returns the median of each column.
func medianRow(rows []benchRow) benchRow {
	median := func(of func(benchRow) float64) float64 {
		var all []float64
		for _, r := range rows {
			all = append(all, of(r))
		}
		slices.Sort(all)
		return all[len(all)/2]
	}
	return benchRow{
		TokensPerSecond: median(func(r benchRow) float64 { return r.TokensPerSecond }),
		MedianTPOT:      median(func(r benchRow) float64 { return r.MedianTPOT }),
		P99TTFT:         median(func(r benchRow) float64 { return r.P99TTFT }),
		Completed:       int(median(func(r benchRow) float64 { return float64(r.Completed) })),
	}
}

// tunerBench sends one window with tuner bench.
func (s *tinyRun) tunerBench(t *testing.T, url string, rate float64, seed uint64) benchRow {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), s.tuner, "bench", "--url", url, "--workload", "random",
		"--input-tokens", "128", "--output-tokens", "64", "--range-ratio", "0.3", "--vocab-size", "4096",
		"--rate", fmt.Sprint(rate), "--requests", fmt.Sprint(compareLeast), "--seconds", fmt.Sprint(compareSeconds),
		"--lead-in", "3s", "--seed", fmt.Sprint(seed), "-o", "json").Output()
	if err != nil {
		t.Fatalf("tuner bench: %v\n%s", err, stderrOf(err))
	}
	var m bench.Measurement
	if err := json.Unmarshal(out, &m); err != nil {
		t.Fatalf("tuner bench: %v\n%s", err, out)
	}
	return benchRow{TokensPerSecond: m.OutputThroughput, MedianTPOT: m.TPOT.P50, P99TTFT: m.TTFT.P99, Completed: m.Completed}
}

// vllmBench sends n requests with the rig's own vllm bench serve.
func (s *tinyRun) vllmBench(t *testing.T, url string, n int, rate float64, seed uint64) benchRow {
	t.Helper()
	name := fmt.Sprintf("vllm-bench-%d.json", seed)
	cmd := exec.CommandContext(t.Context(), filepath.Join(s.rig.dir, "venv/bin/vllm"), "bench", "serve", "--backend", "openai",
		"--base-url", url, "--model", filepath.Join(s.rig.dir, "tiny-qwen2"), "--served-model-name", "tiny",
		"--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "64", "--random-range-ratio", "0.3",
		"--num-prompts", fmt.Sprint(n), "--request-rate", fmt.Sprint(rate), "--ignore-eos", "--temperature", "0",
		"--seed", fmt.Sprint(seed), "--disable-tqdm", "--save-result", "--result-dir", s.dir, "--result-filename", name)
	cmd.Env = s.rig.env()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("vllm bench serve: %v\n%s", err, out)
	}
	text, err := os.ReadFile(filepath.Join(s.dir, name))
	if err != nil {
		t.Fatal(err)
	}
	var row benchRow
	if err := json.Unmarshal(text, &row); err != nil {
		t.Fatalf("vllm bench serve: %s: %v", name, err)
	}
	return row
}

func stderrOf(err error) []byte {
	if exit, ok := err.(*exec.ExitError); ok {
		return exit.Stderr
	}
	return nil
}
