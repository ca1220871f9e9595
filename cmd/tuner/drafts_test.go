package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// draftsStudy searches the number of speculative tokens on the simulated H200. Its EAGLE-3 drafter gets no token
// accepted, as on the real H200.
const draftsStudy = `version: 1
name: drafts
model: nvidia/Llama-3.3-70B-Instruct-FP8
server: {simulate: h200-llama70b-fp8, args: [--max-model-len, "16384"]}
slo: {ttft_p99: 1000ms, tpot_p99: 60ms}
workload: {kind: phase1}
parameters: {num-speculative-tokens: [0, 3], max-num-seqs: [64, 512]}
speculative_config: {method: eagle3, model: yuhuili/EAGLE3-LLaMA3.3-Instruct-70B}
allow_meaningless_speculation: true
speculation: {min_acceptance: 2%}
sampler: {name: grid}
budget: {trials: 5}
`

// Two trials draft tokens that the model never accepts. These trials end in the warm-up with a diagnosis; the others
// are measured. A study without min_acceptance measures all trials.
func TestAStudyDropsTrialsWhoseDraftsAreRefused(t *testing.T) {
	t.Parallel()
	plainTuner(t, "package tuner runs simulated studies with the race detector")
	root := t.TempDir()
	path := filepath.Join(root, "study.yaml")
	must(t, os.WriteFile(path, []byte(draftsStudy), 0o644))
	command(t, "run", path, "--root", root)
	dropped := 0
	for _, tr := range snapshot(t, filepath.Join(root, "drafts")).Trials {
		drafts := tr.Point["num-speculative-tokens"] == "3"
		switch r := tr.Result; {
		case !drafts && (r.Outcome != trial.Measured || len(tr.Probes) == 0):
			t.Errorf("trial %d drafts nothing and ends as %s with %d probes, want it measured", tr.Number, r.Outcome, len(tr.Probes))
		case drafts:
			dropped++
			if r.Outcome != trial.Dropped || r.Class != serverctl.AcceptanceNearZero || len(tr.Probes) > 0 || r.Capacity.Met() {
				t.Errorf("trial %d drafts and ends as %+v with %d probes, want it dropped in its warm-up", tr.Number, r, len(tr.Probes))
			}
		}
	}
	if dropped != 2 {
		t.Errorf("%d trials were dropped, want two", dropped)
	}
	for _, name := range []string{"best", "status"} {
		out := strings.Join(strings.Fields(command(t, name, "drafts", "--root", root)), " ")
		for _, want := range []string{"3 met the SLO, 2 dropped (acceptance-near-zero 2)", "drafted tokens were accepted (0 %, less than 2 %)",
			"Each step of an answer drafts and verifies 3.0 tokens to gain 0", "GiB beside the drafter"} {
			if !strings.Contains(out, want) {
				t.Errorf("tuner %s says %q, want %q in it", name, out, want)
			}
		}
	}

	all := strings.NewReplacer("name: drafts", "name: all", "speculation: {min_acceptance: 2%}\n", "", "trials: 5", "trials: 3").Replace(draftsStudy)
	must(t, os.WriteFile(path, []byte(all), 0o644))
	command(t, "run", path, "--root", root)
	for _, tr := range snapshot(t, filepath.Join(root, "all")).Trials {
		if tr.Result.Outcome != trial.Measured {
			t.Errorf("without min_acceptance, trial %d ends as %s, want it measured", tr.Number, tr.Result.Outcome)
		}
	}
}
