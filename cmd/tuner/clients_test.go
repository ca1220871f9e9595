//go:build vllm && linux

package main

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// clientPython returns the directory and the Python that serverctl/vllmlab/clients.sh installs. It skips the test if
// they are missing.
func clientPython(t *testing.T) (dir, python string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	must(t, err)
	dir = filepath.Join(cache, "tuner-clients")
	if stamps, _ := filepath.Glob(filepath.Join(dir, "ok-*")); len(stamps) == 0 {
		t.Skipf("no clients are installed in %s; serverctl/vllmlab/clients.sh installs them", dir)
	}
	return dir, filepath.Join(dir, "venv/bin/python")
}

// runClient runs a client program to its end.
func runClient(t *testing.T, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = append(os.Environ(), "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1")
	cmd.Dir = t.TempDir()
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("%s: %v", filepath.Base(name), err)
	}
}

// The openai client and GuideLLM work with the simulated server, whichever vLLM version it imitates.
func TestOutsideClients(t *testing.T) {
	dir, python := clientPython(t)
	script, err := filepath.Abs("../../serverctl/vllmlab/openai_client.py")
	must(t, err)
	for _, version := range []string{"0.14.1", "0.33.0"} {
		t.Run("openai "+version, func(t *testing.T) {
			url := startSim(t, "--sim-version", version, "--api-key", "right")
			runClient(t, python, script, url, "my/model")
		})
		t.Run("guidellm "+version, func(t *testing.T) {
			url := startSim(t, "--sim-version", version)
			file := filepath.Join(t.TempDir(), "out.json")
			runClient(t, filepath.Join(dir, "venv/bin/guidellm"), "run", "--backend", "kind=openai_http,target="+url,
				"--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=40",
				"--tokenizer", "kind=huggingface_auto,model="+filepath.Join(dir, "tokenizer"),
				"--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
				"--output", "kind=json,path="+file, "--disable-console-interactive")
			checkGuideLLM(t, file)
		})
	}
}

// checkGuideLLM checks GuideLLM's report: all requests succeeded, and the time per token matches the simulated server.
func checkGuideLLM(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	must(t, err)
	var report struct {
		Benchmarks []struct {
			Metrics struct {
				Totals struct{ Successful, Errored, Incomplete int } `json:"request_totals"`
				ITL    struct{ Successful struct{ Median float64 } } `json:"inter_token_latency_ms"`
				Output struct{ Successful struct{ Median float64 } } `json:"output_token_count"`
			}
		}
	}
	must(t, json.Unmarshal(text, &report))
	if len(report.Benchmarks) != 1 {
		t.Fatalf("%d benchmarks in the report: %s", len(report.Benchmarks), strings.TrimSpace(string(text[:min(len(text), 300)])))
	}
	m := report.Benchmarks[0].Metrics
	if m.Totals.Errored > 0 || m.Totals.Successful < 36 || m.Output.Successful.Median != 32 {
		t.Errorf("%+v requests with %g tokens in the median, want 40 with 32", m.Totals, m.Output.Successful.Median)
	}
	const want = 5.6 // ms for each token, with four requests in flight on the profile small-fast
	checkNear(t, "median ITL (ms)", m.ITL.Successful.Median, want, 0.15*want)
}
