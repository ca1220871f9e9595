package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/realtime"
	"vllmtuner/serverctl/proc"
	"vllmtuner/studies"
	"vllmtuner/trial/live"
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

// serverRecord returns the process record of the study's server. It returns false if there is none.
func serverRecord(dir string) (proc.Record, bool) {
	text, err := os.ReadFile(filepath.Join(dir, live.RecordFile))
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
