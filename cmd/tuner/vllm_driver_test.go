//go:build vllm && linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial/vllmserve"
)

// Both versions of the real vllm bench serve send load to the simulated server. They accept the tuner's options and
// data set, and the tuner reads their result files.
func TestRealVLLMBenchAsDriver(t *testing.T) {
	for _, version := range []string{"0.14.1", "0.32.0"} {
		t.Run(version, func(t *testing.T) {
			rig := openRig(t, version)
			python := exec.CommandContext(t.Context(), filepath.Join(rig.dir, "venv/bin/python"), "-c", "import pandas")
			if err := python.Run(); err != nil {
				t.Skipf("vLLM %s is installed without pandas, which its custom data sets need (vllm[bench])", version)
			}
			server := startSim(t)
			plan := workload.Plan{Source: texts(t), Seed: 1, Rate: 8, LeadIn: time.Second, Window: 3 * time.Second, MinRequests: 20}
			again := plan
			again.Seed = 2
			load := &vllmserve.Load{
				Command: []string{filepath.Join(rig.dir, "venv/bin/vllm"), "bench", "serve"}, Env: rig.env(), Dir: t.TempDir(),
				Tokenizer: filepath.Join(rig.dir, "tiny-qwen2"), Client: &bench.Client{URL: server, Model: "my/model"},
			}
			run, err := load.Run(t.Context(), plan.Schedule(), nil)
			must(t, err)
			n, window := plan.Counted()
			scope := bench.Scope{Rate: plan.Rate, Start: plan.LeadIn, Length: window}
			theirs := bench.Measure(run, scope)
			own, err := load.Client.Run(t.Context(), again.Schedule(), nil)
			must(t, err)
			ours := bench.Measure(own, scope)
			t.Logf("vllm bench serve %s: %d of %d completed, TTFT p50 %.1f p99 %.1f ms, TPOT p50 %.2f ms, %d requests outside the window", version, theirs.Completed, n, theirs.TTFT.P50, theirs.TTFT.P99, theirs.TPOT.P50, run.Others)
			t.Logf("tuner:                  TTFT p50 %.1f p99 %.1f ms, TPOT p50 %.2f ms", ours.TTFT.P50, ours.TTFT.P99, ours.TPOT.P50)
			if theirs.Completed != n || theirs.OutputTokens != theirs.WantTokens || run.Broken > 0 || run.Others == 0 {
				t.Errorf("%d of %d requests completed with %d of %d tokens, %d of %d requests outside the window failed: %v", theirs.Completed, n, theirs.OutputTokens, theirs.WantTokens, run.Broken, run.Others, theirs.Failures)
			}
			checkNear(t, "median TPOT (ms)", ours.TPOT.P50, theirs.TPOT.P50, 0.25*ours.TPOT.P50)
		})
	}
}

// texts returns a workload of 20 prompts that are texts, not tokens.
func texts(t *testing.T) workload.Source {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data.jsonl")
	var rows strings.Builder
	for i := range 20 {
		fmt.Fprintf(&rows, `{"prompt": "tell me about \"%d\"", "output_tokens": %d}`+"\n", i, 5+i)
	}
	must(t, os.WriteFile(path, []byte(rows.String()), 0o644))
	source, err := workload.Open(workload.Spec{Kind: "jsonl", Path: path}, 1)
	must(t, err)
	return source
}

// startSim starts a simulated server as a child, with the given flags added, and returns its URL.
func startSim(t *testing.T, flags ...string) string {
	t.Helper()
	port, err := unusedPort()
	must(t, err)
	args := append([]string{"sim", "serve", "my/model", "--sim-profile", "small-fast", "--max-model-len", "2048",
		"--host", "127.0.0.1", "--port", port}, flags...)
	child := startChild(t, filepath.Join(t.TempDir(), "sim.log"), nil, tunerPath(t), args...)
	url := "http://127.0.0.1:" + port
	if !isHealthy(url, 30*time.Second, child.exited) {
		t.Fatalf("the simulated server is not ready within 30 s:\n%s", child.output())
	}
	return url
}
