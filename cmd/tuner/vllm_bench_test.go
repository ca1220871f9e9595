//go:build vllm && linux

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/samber/lo"

	"vllmtuner/bench/workload"
)

// tuner bench and vllm bench serve measure the winner with a load of at least this length and this number of requests.
const (
	compareSeconds     = 10
	compareMinRequests = 300
)

// The test compares the medians of quietRounds rounds, because one disturbance on a shared machine moves a p99 by more
// than the test allows. It runs more rounds, up to maxRounds, until quietRounds rounds are quiet. A round is quiet if
// other work took at most maxForeign of the machine. The quietest rounds count.
const (
	quietRounds = 3
	maxRounds   = 6
	maxForeign  = 0.10
)

// A benchRow has the figures that are compared between the two tools.
type benchRow struct {
	TokensPerSecond float64 `json:"output_throughput"`
	MedianTPOT      float64 `json:"median_tpot_ms"`
	P99TTFT         float64 `json:"p99_ttft_ms"`
	Completed       int     `json:"completed"`
	foreign         float64 // share of the machine's CPU time that other processes used
}

func (r benchRow) String() string {
	return fmt.Sprintf("%4d requests  %7.1f tok/s  median TPOT %.3f ms  p99 TTFT %6.2f ms  other work %3.0f %%",
		r.Completed, r.TokensPerSecond, r.MedianTPOT, r.P99TTFT, 100*r.foreign)
}

// A benchRound has the results of both tools with the same load.
type benchRound struct{ ours, theirs benchRow }

func (r benchRound) foreign() float64 { return max(r.ours.foreign, r.theirs.foreign) }

// compareWinner starts the winner by hand and sends it the same load from vllm bench serve and from tuner bench. The
// arrivals are Poisson at the highest rate that passed. The lengths have the same distribution, and answers are greedy
// and have fixed lengths. Each round draws new prompts, so that none is in the prefix cache. The tools take turns in
// going first.
func (s *tinyRun) compareWinner(ctx context.Context, t *testing.T) {
	var best tinyBest
	if err := s.read(ctx, &best, "best", "tiny"); err != nil {
		t.Fatal(err) // `tuner best` also fails if no trial met the SLO
	}
	rate := best.Best.Capacity.Low
	t.Logf("winner: trial %d at %g req/s: %q", best.Best.Number, rate, best.Best.Args)
	url, server := s.rig.serve(t, filepath.Join(s.dir, "winner.log"), best.Best.Args)
	defer server.stop()

	var rounds []benchRound
	isQuiet := func(r benchRound) bool { return r.foreign() <= maxForeign }
	for n := 1; n <= maxRounds && lo.CountBy(rounds, isQuiet) < quietRounds; n++ {
		rounds = append(rounds, s.round(ctx, t, n, url, rate))
	}
	slices.SortStableFunc(rounds, func(a, b benchRound) int { return cmp.Compare(a.foreign(), b.foreign()) })
	rounds = rounds[:quietRounds]
	ours := medianRow(rounds, func(r benchRound) benchRow { return r.ours })
	theirs := medianRow(rounds, func(r benchRound) benchRow { return r.theirs })
	t.Logf("medians of the %d quietest rounds", quietRounds)
	t.Logf("  tuner bench       %v", ours)
	t.Logf("  vllm bench serve  %v", theirs)
	checkNear(t, "output tok/s", ours.TokensPerSecond, theirs.TokensPerSecond, 0.03*theirs.TokensPerSecond)
	checkNear(t, "median TPOT (ms)", ours.MedianTPOT, theirs.MedianTPOT, 0.10*theirs.MedianTPOT)
	checkNear(t, "p99 TTFT (ms)", ours.P99TTFT, theirs.P99TTFT, max(25, 0.25*theirs.P99TTFT))
}

// round measures the server once with each tool.
//
// vllm bench serve stretches its arrivals so that the last of N requests is due at N/rate (get_request in
// vllm/benchmarks/serve.py). Its rate is therefore set to N divided by the window in which the tuner sends N requests.
func (s *tinyRun) round(ctx context.Context, t *testing.T, number int, url string, rate float64) benchRound {
	t.Helper()
	seed := uint64(number)
	n, window := workload.Plan{Seed: seed, Rate: rate, Window: compareSeconds * time.Second, MinRequests: compareMinRequests}.Counted()
	var r benchRound
	tools := []func(){
		func() { r.ours = s.tunerBench(ctx, t, url, rate, seed) },
		func() { r.theirs = s.vllmBench(ctx, t, url, n, float64(n)/window.Seconds(), seed) },
	}
	if number%2 == 0 {
		slices.Reverse(tools)
	}
	for _, run := range tools {
		run()
	}
	t.Logf("round %d", number)
	t.Logf("  tuner bench       %v", r.ours)
	t.Logf("  vllm bench serve  %v", r.theirs)
	if r.ours.Completed != n || r.theirs.Completed != n {
		t.Errorf("round %d: %d and %d requests completed, want %d", number, r.ours.Completed, r.theirs.Completed, n)
	}
	return r
}

// runTool runs one of the tools. It returns the output, and the share of the machine's CPU time that other processes
// used during the run.
func (s *tinyRun) runTool(t *testing.T, cmd *exec.Cmd) (out []byte, foreign float64) {
	t.Helper()
	server := s.rig.processes(t)
	busy, all := machineTime(t)
	served := cpuTime(server)
	out, err := cmd.Output()
	if err != nil {
		var stderr []byte
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			stderr = exit.Stderr
		}
		t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, stderr)
	}
	ours := cpuTime(server) - served + cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	busyAfter, allAfter := machineTime(t)
	return out, max(0, float64(busyAfter-busy-ours)/float64(allAfter-all))
}

func checkNear(t *testing.T, what string, ours, theirs, band float64) {
	t.Helper()
	if !(math.Abs(ours-theirs) <= band) {
		t.Errorf("%s: tuner bench says %.3f, vllm bench serve %.3f: want them within %.3f", what, ours, theirs, band)
	}
}

// medianRow returns the median of each figure over the rounds of one tool.
func medianRow(rounds []benchRound, tool func(benchRound) benchRow) benchRow {
	median := func(column func(benchRow) float64) float64 {
		all := make([]float64, len(rounds))
		for i, r := range rounds {
			all[i] = column(tool(r))
		}
		return medianOf(all)
	}
	return benchRow{
		TokensPerSecond: median(func(r benchRow) float64 { return r.TokensPerSecond }),
		MedianTPOT:      median(func(r benchRow) float64 { return r.MedianTPOT }),
		P99TTFT:         median(func(r benchRow) float64 { return r.P99TTFT }),
		Completed:       int(median(func(r benchRow) float64 { return float64(r.Completed) })),
		foreign:         median(func(r benchRow) float64 { return r.foreign }),
	}
}

// tunerBench measures one window with tuner bench.
func (s *tinyRun) tunerBench(ctx context.Context, t *testing.T, url string, rate float64, seed uint64) benchRow {
	t.Helper()
	out, foreign := s.runTool(t, exec.CommandContext(ctx, s.tuner, "bench", "--url", url, "--workload", "random",
		"--input-tokens", "128", "--output-tokens", "64", "--range-ratio", "0.3", "--vocab-size", "4096",
		"--rate", fmt.Sprint(rate), "--requests", fmt.Sprint(compareMinRequests), "--seconds", fmt.Sprint(compareSeconds),
		"--lead-in", "2s", "--seed", fmt.Sprint(seed), "-o", "json"))
	row := benchRow{foreign: foreign}
	if err := json.Unmarshal(out, &row); err != nil {
		t.Fatalf("tuner bench: %v\n%s", err, out)
	}
	return row
}

// vllmBench sends n requests with the rig's own vllm bench serve.
func (s *tinyRun) vllmBench(ctx context.Context, t *testing.T, url string, n int, rate float64, seed uint64) benchRow {
	t.Helper()
	name := fmt.Sprintf("vllm-bench-%d.json", seed)
	cmd := exec.CommandContext(ctx, filepath.Join(s.rig.dir, "venv/bin/vllm"), "bench", "serve", "--backend", "openai",
		"--base-url", url, "--model", filepath.Join(s.rig.dir, "tiny-qwen2"), "--served-model-name", "tiny",
		"--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "64", "--random-range-ratio", "0.3",
		"--num-prompts", fmt.Sprint(n), "--request-rate", fmt.Sprint(rate), "--ignore-eos", "--temperature", "0",
		"--seed", fmt.Sprint(seed), "--disable-tqdm", "--save-result", "--result-dir", s.dir, "--result-filename", name)
	cmd.Env = s.rig.env()
	_, foreign := s.runTool(t, cmd)
	text, err := os.ReadFile(filepath.Join(s.dir, name))
	must(t, err)
	row := benchRow{foreign: foreign}
	if err := json.Unmarshal(text, &row); err != nil {
		t.Fatalf("vllm bench serve: %s: %v", name, err)
	}
	return row
}
