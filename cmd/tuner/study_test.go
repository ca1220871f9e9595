package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
	"vllmtuner/trial/live"
	"vllmtuner/tuner/studyfile"
)

// smallStudy is a study of the simulated small-fast server. %s makes the server a child process that is measured over HTTP, or
// simulates it in virtual time. Under the reset protocol no result depends on earlier measurements.
const smallStudy = `version: 1
name: small
model: example/small-fast
server:
  %s
  args: [--max-model-len, "2048"]
slo: {ttft_p95: 120ms, tpot_p95: 25ms}
workload: {kind: random, input_tokens: 128, output_tokens: 32, range_ratio: 0.3, requests: 500}
parameters:
  gpu-memory-utilization: {float: [0.60, 0.95], step: 0.05}
  max-num-seqs: {int: [2, 12], log: true}
  max-num-batched-tokens: {int: [256, 2048], log: true}
sampler: {name: tpe, seed: 3}
budget: {trials: %d}
probe: {seconds: %g, min_requests: 50, lead_in: 1s, start_rate: 20, max_rate: 60, tolerance: 0.3, max_probes: 4}
cache: {protocol: reset, prime_rate: 20}
`

const (
	overHTTP  = "command: [tuner, sim, serve, --sim-profile=small-fast]"
	inVirtual = "simulate: small-fast"
)

func writeStudy(t *testing.T, reach string, trials int, seconds float64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "study.yaml")
	must(t, os.WriteFile(path, fmt.Appendf(nil, smallStudy, reach, trials, seconds), 0o644))
	return path
}

// writePatientStudy writes a study over HTTP whose probes pass on a busy machine too. Its TTFT limit is a minute, and its answers
// have one token, so there is no time between tokens that a busy machine could lengthen.
func writePatientStudy(t *testing.T, server string, trials int, seconds float64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "study.yaml")
	patient := strings.NewReplacer("{ttft_p95: 120ms, tpot_p95: 25ms}", "{ttft_p95: 60s}", "output_tokens: 32, range_ratio: 0.3", "output_tokens: 1",
		"min_requests: 50", "min_requests: 20", "max_rate: 60", "max_rate: 26")
	must(t, os.WriteFile(path, []byte(patient.Replace(fmt.Sprintf(smallStudy, server, trials, seconds))), 0o644))
	return path
}

func snapshot(t *testing.T, dir string) studies.Study {
	t.Helper()
	s, err := studies.ReadSnapshot(dir)
	must(t, err)
	return s
}

// start starts the command and returns it with its standard error.
func start(t *testing.T, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	cmd := tunerCommand(context.WithoutCancel(t.Context()), t, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	must(t, cmd.Start())
	return cmd, &stderr
}

// serverRecord returns the process record of the study's server. It returns false if there is none.
func serverRecord(dir string) (proc.Record, bool) {
	text, err := os.ReadFile(filepath.Join(dir, live.RecordFile))
	if err != nil {
		return proc.Record{}, false
	}
	var r proc.Record
	return r, json.Unmarshal(text, &r) == nil
}

// A study of three trials over HTTP is killed with SIGKILL in the middle of a trial. The next run keeps the stored probes and
// finishes the study.
func TestStudyOverHTTPIsKilledAndResumed(t *testing.T) {
	t.Parallel()
	path, root := writePatientStudy(t, overHTTP, 3, 2), t.TempDir()
	dir := filepath.Join(root, "small")
	cmd, stderr := start(t, "run", path, "--root", root)
	deadline := time.After(4 * time.Minute)
	var had studies.Study
	for len(had.Trials) < 2 || len(had.Trials[1].Probes) == 0 || had.Trials[1].State != studies.Running {
		select {
		case <-deadline:
			t.Fatalf("trial 1 has no probe after 4 min:\n%s", stderr)
		case <-time.After(20 * time.Millisecond):
		}
		if s, err := studies.ReadSnapshot(dir); err == nil {
			had = s
		}
	}
	record, ok := serverRecord(dir)
	if !ok {
		t.Fatal("a trial runs, but no record of its server is kept")
	}
	must(t, cmd.Process.Signal(syscall.SIGKILL))
	if err := cmd.Wait(); err == nil {
		t.Fatal("the killed tuner ended without an error")
	}
	command(t, "status", "small", "--root", root) // a killed study can still be read

	out := command(t, "run", path, "--root", root)
	if !strings.Contains(out, "--max-model-len 2048") || !strings.Contains(out, "3 of 3 trials done") {
		t.Errorf("the resumed study prints\n%s", out)
	}
	killed, err := proc.Reclaim(record)
	if err != nil || len(killed) > 0 {
		t.Errorf("processes %v of the killed run's server were left, %v", killed, err)
	}
	after := snapshot(t, dir)
	for i, was := range had.Trials {
		is := after.Trials[i]
		if was.Point.String() != is.Point.String() || len(is.Probes) < len(was.Probes) {
			t.Fatalf("trial %d was %s with %d probes and is %s with %d", i, was.Point, len(was.Probes), is.Point, len(is.Probes))
		}
		for j, p := range was.Probes {
			if !equalJSON(t, p, is.Probes[j]) {
				t.Errorf("probe %d of trial %d was measured again", j, i)
			}
		}
	}
	logs, err := filepath.Glob(filepath.Join(dir, "logs", "*.log"))
	if err != nil || len(logs) != 3 {
		t.Errorf("there are the logs %v, want three", logs)
	}
}

func equalJSON(t *testing.T, a, b any) bool {
	t.Helper()
	x, err := json.Marshal(a)
	must(t, err)
	y, err := json.Marshal(b)
	must(t, err)
	return bytes.Equal(x, y)
}

// One study runs in virtual time and over HTTP. Both runs begin with the same point. Probes of the same point at the same rate have
// the same requests and similar latencies.
func TestBothLoadsAgree(t *testing.T) {
	realtime.Only(t, "holds real time against virtual time")
	root := t.TempDir()
	measured := map[string]studies.Study{}
	for _, reach := range []string{overHTTP, inVirtual} {
		path := writeStudy(t, reach, 3, 3)
		sub := filepath.Join(root, strings.Fields(reach)[0])
		command(t, "run", path, "--root", sub)
		measured[reach] = snapshot(t, filepath.Join(sub, "small"))
	}
	compared, agreed := 0, 0
	for i, http := range measured[overHTTP].Trials {
		virtual := measured[inVirtual].Trials[i]
		if i == 0 && http.Point.String() != virtual.Point.String() {
			t.Fatalf("trial 0 is %s over HTTP and %s in virtual time", http.Point, virtual.Point)
		}
		for _, h := range http.Probes {
			for _, v := range virtual.Probes {
				if h.Seq != v.Seq || h.Rate != v.Rate || http.Point.String() != virtual.Point.String() || h.Stopped || v.Stopped {
					continue
				}
				compared++
				hm, vm := h.Measurement, v.Measurement
				if hm.Requests != vm.Requests || hm.WantTokens != vm.WantTokens || hm.PromptTokens != vm.PromptTokens {
					t.Errorf("trial %d at %g req/s: %d requests, %d and %d tokens over HTTP; %d, %d and %d in virtual time",
						i, h.Rate, hm.Requests, hm.PromptTokens, hm.WantTokens, vm.Requests, vm.PromptTokens, vm.WantTokens)
				}
				t.Logf("trial %d at %5.1f req/s: median TPOT %.2f and %.2f ms, median TTFT %.1f and %.1f ms, p99 TTFT %.1f and %.1f ms, pass %v and %v", i, h.Rate,
					hm.TPOT.P50, vm.TPOT.P50, hm.TTFT.P50, vm.TTFT.P50, hm.TTFT.P99, vm.TTFT.P99, h.Verdict.Pass, v.Verdict.Pass)
				if near(hm.TPOT.P50, vm.TPOT.P50, 0.15, 0.5) && near(hm.TTFT.P50, vm.TTFT.P50, 0.25, 10) {
					agreed++
				}
			}
		}
	}
	if compared == 0 || agreed*4 < compared*3 {
		t.Errorf("%d of %d probes agree within 15 %% on median TPOT and 25 %% or 10 ms on median TTFT, want three of four", agreed, compared)
	}
}

// near reports whether a and b, in ms, differ by at most a share of b or by at most a number of ms.
func near(a, b, share, ms float64) bool { return math.Abs(a-b) <= max(share*b, ms) }

// A second tuner on one study refuses to run, names the owner, and changes nothing.
func TestSecondTunerRefuses(t *testing.T) {
	t.Parallel()
	path, root := writePatientStudy(t, overHTTP, 6, 2), t.TempDir()
	cmd, stderr := start(t, "run", path, "--root", root)
	defer func() {
		if err := cmd.Wait(); cmd.ProcessState.ExitCode() != exitInterrupted {
			t.Errorf("after SIGTERM the first ends with %v:\n%s", err, stderr)
		}
	}()
	dir := filepath.Join(root, "small")
	for range 600 {
		if _, ok := serverRecord(dir); ok {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	second := tunerCommand(t.Context(), t, "run", path, "--root", root)
	out, err := second.CombinedOutput()
	if second.ProcessState.ExitCode() != exitOwned || !strings.Contains(string(out), fmt.Sprintf("another tuner owns this study: pid %d", cmd.Process.Pid)) {
		t.Errorf("the second ends with %v and says %q, want exit code 3 and the owner", err, out)
	}
	result := filepath.Join(t.TempDir(), "result.txt")
	const row = "max_num_seqs: 8, max_num_batched_tokens: 512, request_rate: 20, e2el: 400, throughput: 18, goodput: 18\n"
	must(t, os.WriteFile(result, []byte(row), 0o644))
	importing := tunerCommand(t.Context(), t, "import", path, result, "--root", root)
	if out, err := importing.CombinedOutput(); importing.ProcessState.ExitCode() != exitOwned {
		t.Errorf("an import into a study that runs ends with %v and says %q, want exit code 3", err, out)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // the first tuner finishes its probe and stops
		t.Fatal(err)
	}
}

func TestDemoFileIsAStudy(t *testing.T) {
	for _, sampler := range studyfile.Samplers {
		f, err := demoStudy(t.TempDir(), sampler, 42)
		if err != nil || f.Sampler.Name != sampler || f.Sampler.Seed != 42 || f.Name != "demo-"+sampler+"-42" {
			t.Errorf("demoStudy(%s, 42) = %+v, %v", sampler, f, err)
		}
	}
}
