package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// worstStudy has such low rates that its probes run a few requests at a time, though the server admits 64.
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

// A server survives a search at low rates, and dies under the load that it admits. Its point is infeasible, with the server's
// last log lines as evidence. Without the worst case, the point would get a capacity.
func TestAServerThatDiesUnderTheLoadItAdmits(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, text string
		outcome    trial.Outcome
		class      serverctl.Class
		says       string
		exit       int
	}{
		{"as usual", worstStudy, trial.Infeasible, serverctl.OOMLoad, "died under ", exitNothingMet},
		{"left out", strings.Replace(worstStudy, "max_rate: 5.1", "max_rate: 5.1, worst_case: false", 1), trial.Measured, "", "", 0},
		{"survived", strings.Replace(worstStudy, "running=40", "running=4000", 1), trial.Measured, "", "the server survived ", 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			if row.name != "as usual" {
				plainTuner(t, "the usual case runs with the race detector")
			}
			root := t.TempDir()
			path := filepath.Join(root, "study.yaml")
			must(t, os.WriteFile(path, []byte(row.text), 0o644))
			cmd := tunerCommand(t.Context(), t, "run", path, "--root", root)
			if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != row.exit {
				t.Errorf("ends with %v, want exit code %d\n%s", err, row.exit, out)
			}
			trials := snapshot(t, filepath.Join(root, "worst")).Trials
			if len(trials) != 1 {
				t.Fatalf("%d trials", len(trials))
			}
			r := trials[0].Result
			if r.Outcome != row.outcome || r.Class != row.class || len(trials[0].Probes) == 0 ||
				!strings.Contains(r.Evidence+strings.Join(r.Notes, " "), row.says) {
				t.Errorf("%s (%s) after %d probes, %q, notes %q; want %s (%s)", r.Outcome, r.Class, len(trials[0].Probes), r.Evidence, r.Notes, row.outcome, row.class)
			}
		})
	}
}
