package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
)

// smallStudy is a study of the simulated small-fast server. %s is that server: either a child process that is measured
// over HTTP, or a simulation in virtual time. Under the reset protocol no result depends on earlier measurements.
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
budget: {confirm: 0, trials: %d}
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

// writePatientStudy writes a study over HTTP whose probes pass on a busy machine too. Its TTFT limit is a minute, and
// its answers have one token, so there is no time between tokens that a busy machine could lengthen.
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

// serverRecord returns the process record of the study's server. It returns false if there is none.
func serverRecord(dir string) (proc.Record, bool) {
	text, err := os.ReadFile(filepath.Join(dir, "server.json"))
	if err != nil {
		return proc.Record{}, false
	}
	var r proc.Record
	return r, json.Unmarshal(text, &r) == nil
}

func equalJSON(t *testing.T, a, b any) bool {
	t.Helper()
	x, err := json.Marshal(a)
	must(t, err)
	y, err := json.Marshal(b)
	must(t, err)
	return bytes.Equal(x, y)
}
