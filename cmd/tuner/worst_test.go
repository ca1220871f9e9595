package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// worstStudy probes such low rates that only a few requests run at a time, though the server admits 64. The server runs out of
// memory when 40 requests run.
const worstStudy = `version: 1
name: worst
model: example/small-fast
server: {command: [tuner, sim, serve, --sim-profile=small-fast, "--sim-fault=oom-load:running=40"], args: [--max-model-len, "2048"]}
slo: {ttft_p80: 2s}
workload: {kind: random, input_tokens: 128, output_tokens: 32, requests: 500}
parameters: {max-num-seqs: [64]}
sampler: {name: grid}
budget: {trials: 1}
probe: {seconds: 1, min_requests: 5, lead_in: 0s, start_rate: 5, min_rate: 5, max_rate: 5.1}
cache: {protocol: reset}
`

// A server survives the search at low rates, and dies when as many requests run as it admits. Its point is infeasible, with the
// server's last log lines as evidence. Without the worst-case load, the point would get a capacity.
func TestAServerThatDiesUnderTheLoadItAdmits(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, text string
		outcome    trial.Outcome
		class      serverctl.Class
		says       string
		exit       int
	}{
		{"the worst case is tried", worstStudy, trial.Infeasible, serverctl.OOMLoad, "died under ", exitNothingMet},
		{"the worst case is left out", strings.Replace(worstStudy, "max_rate: 5.1", "max_rate: 5.1, worst_case: false", 1), trial.Measured, "", "", 0},
		{"the server survives the worst case", strings.Replace(worstStudy, "running=40", "running=4000", 1), trial.Measured, "", "the server survived ", 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			if row.outcome != trial.Infeasible {
				plainTuner(t, "the case in which the server dies runs with the race detector")
			}
			root := t.TempDir()
			path := filepath.Join(root, "study.yaml")
			must(t, os.WriteFile(path, []byte(row.text), 0o644))
			cmd := tunerCommand(t.Context(), t, "run", path, "--root", root)
			if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != row.exit {
				t.Errorf("tuner run ends with %v, want exit code %d\n%s", err, row.exit, out)
			}
			trials := snapshot(t, filepath.Join(root, "worst")).Trials
			if len(trials) != 1 {
				t.Fatalf("the study has %d trials, want 1", len(trials))
			}
			r := trials[0].Result
			if r.Outcome != row.outcome || r.Class != row.class || len(trials[0].Probes) == 0 ||
				!strings.Contains(r.Evidence+strings.Join(r.Notes, " "), row.says) {
				t.Errorf("the trial is %s (%s) after %d probes, evidence %q, notes %q; want %s (%s) with %q", r.Outcome, r.Class, len(trials[0].Probes), r.Evidence, r.Notes, row.outcome, row.class, row.says)
			}
		})
	}
}
