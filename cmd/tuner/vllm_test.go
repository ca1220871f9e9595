//go:build vllm && linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// tinyStudy is a study that shows the effect of flags in minutes on two cores. Prompts have 128 tokens, answers have 64
// tokens, and the limit is a p99 TTFT of 150 ms. Under this load, vLLM 0.14.1 on CPU carries about 16 req/s with 2
// sequences, 30 with 4, and more than 100 with its defaults. The rates end at 20, because vllm bench serve runs on the
// same two cores. At 30 req/s vllm bench serve once measured a p99 TTFT of 40 ms. tuner bench measured 10 ms there on
// the same server (medians of three rounds). %[1]s is the rig's directory, %[2]s the line that allows speculation on
// dummy weights. Seed 18 draws a point with 2 sequences, a point with speculation, and a point with a middling number
// of sequences.
const tinyStudy = `version: 1
name: tiny
model: %[1]s/tiny-qwen2
server:
  command: [%[1]s/venv/bin/vllm, serve]
  args: [--served-model-name, tiny, --load-format, dummy, --dtype, bfloat16, --max-model-len, "2048", --enforce-eager]
  current: [--max-num-seqs, "4", --max-num-batched-tokens, "256"]
  env:
    VLLM_CPU_KVCACHE_SPACE: "1"
    VLLM_CPU_OMP_THREADS_BIND: nobind
    OMP_NUM_THREADS: "1"
    HF_HUB_OFFLINE: "1"
    TRANSFORMERS_OFFLINE: "1"
    VLLM_NO_USAGE_STATS: "1"
  start_timeout: 3m
slo: {ttft_p99: 150ms, tpot_p99: 30ms}
workload: {kind: random, input_tokens: 128, output_tokens: 64, range_ratio: 0.3, vocab_size: 4096}
parameters:
  max-num-seqs: {int: [2, 64], log: true}
  max-num-batched-tokens: {int: [32, 2048], log: true}
  num-speculative-tokens: [0, 3]
speculative_config: {method: ngram, prompt_lookup_max: 4}
constraints: ["max-num-batched-tokens >= max-num-seqs"]
%[2]s
probe: {seconds: 15, min_requests: 300, lead_in: 2s, start_rate: 20, min_rate: 5, max_rate: 20, tolerance: 0.3, max_probes: 4}
cache: {protocol: reset}
budget: {confirm: 0, min_gain: 0, trials: 5}
sampler: {name: random, seed: 18}
`

const allowed = "allow_meaningless_speculation: true"

// minSpread is the least ratio of the best to the worst capacity that shows that flags have an effect. The rates end at
// 20 req/s: the best point passes there, and a point with 2 sequences does not (about 16). If flags had no effect, all
// points would pass at 20 req/s.
const minSpread = 1.15

// A tinyStatus has the fields that the test reads from `tuner status -o json`.
type tinyStatus struct {
	State string
	List  []tinyTrial
}

type tinyTrial struct {
	Number                        int
	Origin, State, Outcome, Class string
	Evidence                      string
	Point                         map[string]string
	Capacity                      float64 `json:"capacity_rps"`
	Probes                        []tinyProbe
}

type tinyProbe struct {
	Rate, Headroom float64
	Pass           bool
}

// A tinyBest has the fields that the test reads from `tuner best -o json`.
type tinyBest struct {
	Best struct {
		Number   int
		Args     []string
		Capacity struct {
			Low float64
		}
	}
}

// TestVLLM runs a study against real vLLM as a user does. It kills the tuner in the middle of a trial and resumes the
// study. It measures the winner with vllm bench serve too. The short form leaves out this comparison and the spread of
// the capacities, because they need a quiet machine.
func TestVLLM(t *testing.T) {
	tuner := buildTuner(t)
	for _, version := range []string{"0.14.1", "0.32.0"} {
		t.Run(version, func(t *testing.T) {
			ctx, cancel := contextOf(t)
			defer cancel()
			r := openRig(t, version)
			s := &tinyRun{rig: r, tuner: tuner, dir: t.ArtifactDir()}
			s.root = filepath.Join(s.dir, "studies")
			s.refuseMeaninglessSpeculation(ctx, t)
			killed := s.runAndKill(ctx, t)
			s.resume(ctx, t, killed)
			s.checkTrials(ctx, t)
			if testing.Short() {
				t.Log("short: the winner is not measured with vllm bench serve, because a busy machine distorts the comparison")
			} else {
				s.compareWinner(ctx, t)
			}
			r.checkNothingLeft(t)
		})
	}
}

// contextOf returns a context that ends 30 s before go test's time limit. At that limit, go test would end the test
// without stopping its servers.
func contextOf(t *testing.T) (context.Context, context.CancelFunc) {
	deadline, ok := t.Deadline()
	if !ok {
		deadline = time.Now().Add(20 * time.Minute)
	}
	return context.WithDeadline(t.Context(), deadline.Add(-30*time.Second))
}

func buildTuner(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tuner")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags", buildTags, "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("build the tuner: %v\n%s", err, out)
	}
	return path
}

// A tinyRun is the tuner with one study on one rig.
type tinyRun struct {
	rig   *rig
	tuner string // path of the binary
	dir   string // directory with the study file, the logs and the studies
	root  string
}

// study writes the study file and returns its path.
func (s *tinyRun) study(t *testing.T, name, allow string) string {
	t.Helper()
	path := filepath.Join(s.dir, name)
	text := fmt.Sprintf(tinyStudy, s.rig.dir, allow)
	if testing.Short() { // the short form checks no capacity, and must pass on a busy machine too; its seed draws speculation first
		text = strings.NewReplacer(
			"seconds: 15, min_requests: 300", "seconds: 6, min_requests: 100",
			"ttft_p99: 150ms, tpot_p99: 30ms", "ttft_p99: 10s, tpot_p99: 1s",
			"start_rate: 20", "start_rate: 8", "max_rate: 20", "max_rate: 12", "trials: 5", "trials: 3", "seed: 18", "seed: 7",
		).Replace(text)
	}
	must(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// read runs a command of the tuner that prints JSON, and decodes the JSON into v.
func (s *tinyRun) read(ctx context.Context, v any, args ...string) error {
	var stderr strings.Builder
	cmd := exec.CommandContext(ctx, s.tuner, append(args, "--root", s.root, "-o", "json")...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err == nil {
		err = json.Unmarshal(out, v)
	}
	if err != nil {
		return fmt.Errorf("tuner %s: %w\n%s%s", strings.Join(args, " "), err, out, stderr.String())
	}
	return nil
}

func (s *tinyRun) refuseMeaninglessSpeculation(ctx context.Context, t *testing.T) {
	path := s.study(t, "refused.yaml", "")
	out, err := exec.CommandContext(ctx, s.tuner, "run", path, "--root", s.root).CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != exitUsage || !strings.Contains(string(out), "allow_meaningless_speculation") {
		t.Fatalf("speculation on dummy weights: %v, want exit code %d and the name of the key that allows it:\n%s", err, exitUsage, out)
	}
	t.Logf("refused: %s", strings.TrimSpace(string(out)))
}

// start begins a run of the study. Its output goes to the file log.
func (s *tinyRun) start(t *testing.T, log string) *child {
	t.Helper()
	path := s.study(t, "study.yaml", allowed)
	return startChild(t, filepath.Join(s.dir, log), os.Environ(), s.tuner, "run", path, "--root", s.root)
}

// runAndKill kills the tuner while a trial with a stored probe measures its next probe. It returns the trial as it was
// stored before the kill.
func (s *tinyRun) runAndKill(ctx context.Context, t *testing.T) tinyTrial {
	run := s.start(t, "run-1.log")
	for ctx.Err() == nil && !run.done() {
		time.Sleep(time.Second)
		var status tinyStatus
		if s.read(ctx, &status, "status", "tiny") != nil || len(status.List) == 0 {
			continue // the study does not exist yet
		}
		last := status.List[len(status.List)-1]
		if last.Number == 0 || last.State != "running" || len(last.Probes) == 0 {
			continue
		}
		if len(s.rig.processes(t)) == 0 {
			continue // one server has ended and the next one has not started
		}
		run.kill()
		t.Logf("killed the tuner in trial %d after %d probes:\n%s", last.Number, len(last.Probes), run.output())
		return last
	}
	t.Fatalf("the run or the test's time ended before a trial had a probe:\n%s", run.output())
	return tinyTrial{}
}

// resume runs the study to its end. The killed run's server must be gone when the next server starts.
func (s *tinyRun) resume(ctx context.Context, t *testing.T, killed tinyTrial) {
	left := s.rig.processes(t)
	t.Logf("the killed run has left %d processes of vLLM", len(left))
	run := s.start(t, "run-2.log")
	for !run.done() {
		if ctx.Err() != nil {
			t.Fatalf("the study did not end within the test's time:\n%s", run.output())
		}
		now := s.rig.processes(t)
		isNew := func(p process) bool { return !slices.Contains(left, p) }
		if slices.ContainsFunc(now, isNew) {
			if old := slices.DeleteFunc(now, isNew); len(old) > 0 {
				t.Fatalf("a new server runs while processes of the killed run's server still run: %v", old)
			}
		}
		time.Sleep(500 * time.Millisecond)
	}
	if err := run.err(); err != nil {
		t.Fatalf("the resumed study: %v\n%s", err, run.output())
	}
	t.Logf("resumed and done:\n%s", run.output())
	s.rig.checkNothingLeft(t)

	var status tinyStatus
	must(t, s.read(ctx, &status, "status", "tiny"))
	if killed.Number >= len(status.List) {
		t.Fatalf("trial %d is not in the study any more", killed.Number)
	}
	resumed := status.List[killed.Number].Probes
	if len(resumed) < len(killed.Probes) || !slices.Equal(resumed[:len(killed.Probes)], killed.Probes) {
		t.Errorf("after the resume trial %d has the probes %v, want them to begin with the probes stored before the kill: %v", killed.Number, resumed, killed.Probes)
	}
}

// checkTrials checks that the flags reached vLLM, and that they change the capacity.
func (s *tinyRun) checkTrials(ctx context.Context, t *testing.T) {
	var status tinyStatus
	must(t, s.read(ctx, &status, "status", "tiny"))
	measured, speculated, best, worst, seen := 0, 0, 0.0, math.Inf(1), map[string]int{}
	for _, trial := range status.List {
		if trial.State != "done" {
			t.Errorf("trial %d is %s, want done", trial.Number, trial.State)
		}
		said := s.checkArgs(t, trial)
		if other, ok := seen[said]; ok {
			t.Errorf("trials %d and %d ran with the same args: %s", other, trial.Number, said)
		}
		seen[said] = trial.Number
		if trial.Outcome == "measured" {
			measured++
			best, worst = max(best, trial.Capacity), min(worst, trial.Capacity)
		}
		if trial.Point["num-speculative-tokens"] == "3" {
			s.checkSpeculation(t, trial)
			speculated++
		}
	}
	if speculated == 0 {
		t.Error("no trial has speculation")
	}
	want := 4
	if testing.Short() {
		want = 2
	}
	if measured < want {
		t.Errorf("%d trials were measured, want at least %d", measured, want)
	}
	if best < minSpread*worst && !testing.Short() {
		t.Errorf("the best capacity is %.3g req/s, the worst %.3g; want a ratio of at least %g", best, worst, minSpread)
	}
}

var nonDefault = regexp.MustCompile(`non-default args: (\{.*\})`)

// checkArgs compares the args that vLLM logs with the trial's point. It returns the args without the port, which
// differs between starts.
func (s *tinyRun) checkArgs(t *testing.T, trial tinyTrial) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.root, "tiny", "logs", fmt.Sprintf("trial-%04d.log", trial.Number)))
	must(t, err)
	said := nonDefault.FindStringSubmatch(string(text))
	if said == nil {
		t.Fatalf("trial %d: no line with vLLM's non-default args in its log", trial.Number)
	}
	for name, value := range trial.Point {
		key := strings.ReplaceAll(name, "-", "_")
		want := fmt.Sprintf("'%s': %s", key, value)
		if off := key == "num_speculative_tokens" && value == "0"; off == strings.Contains(said[1], want) {
			t.Errorf("trial %d with %s=%s: vLLM says %s", trial.Number, name, value, said[1])
		}
	}
	return regexp.MustCompile(`'port': \d+`).ReplaceAllString(said[1], "")
}

// checkSpeculation checks the result of a trial with speculation. vLLM 0.14.1 refuses speculation on CPU, 0.32.0
// supports it.
func (s *tinyRun) checkSpeculation(t *testing.T, trial tinyTrial) {
	t.Helper()
	if s.rig.version != "0.14.1" {
		if trial.Outcome != "measured" {
			t.Errorf("trial %d with speculation is %s (%s: %s), want measured", trial.Number, trial.Outcome, trial.Class, trial.Evidence)
		}
		return
	}
	if trial.Outcome != "infeasible" || trial.Class != "start-crash" || !strings.Contains(trial.Evidence, "spec decode is not supported") {
		t.Errorf("trial %d with speculation is %s (%s: %s), want infeasible (start-crash: spec decode is not supported)",
			trial.Number, trial.Outcome, trial.Class, trial.Evidence)
	}
}
