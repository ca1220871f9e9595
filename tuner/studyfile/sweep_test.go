package studyfile

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

const sweepHead = `version: 1
name: by-hand
model: meta/llama
server: {command: [vllm, serve], args: [--max-model-len, 16384]}
slo: {ttft_p99: 1000ms}
workload: {kind: phase1}
`

func TestSweepIsRead(t *testing.T) {
	f := parse(t, sweepHead+`
sweep:
  configs:
    phase0: {}
    Wide_1.5:
      description: more of all
      args: [--max-num-seqs, 256, --no-enable-prefix-caching, '--gpu_memory_utilization=0.95']
  rates: [0.5, 0.75, 2]
  requests: 100
  warm_up: {requests: 5, rate: 1, cooldown: 1s}
  cooldown: 0s
  cache: reset
  seed: 42
`)
	want := &Sweep{
		Configs: []Config{
			{Name: "phase0"},
			{Name: "Wide_1.5", Description: "more of all", Args: []string{"--max-num-seqs", "256", "--no-enable-prefix-caching", "--gpu_memory_utilization=0.95"}},
		},
		Rates: []float64{0.5, 0.75, 2}, Requests: 100, WarmUp: WarmUp{5, 1, time.Second}, Cache: trial.Reset, Seed: 42,
	}
	if !reflect.DeepEqual(f.Sweep, want) {
		t.Errorf("the sweep is %+v, want %+v", f.Sweep, want)
	}
	if got := f.ConfigArgs(f.Sweep.Configs[1]); !slices.Equal(got[:4], []string{"--max-model-len", "16384", "--max-num-seqs", "256"}) {
		t.Errorf("the server's args are %q, want the file's before the config's", got)
	}
	if got := space.FlagValues(f.Sweep.Configs[1].Args); len(got) != 3 || got["max-num-seqs"] != "256" || got["enable-prefix-caching"] != "false" || got["gpu-memory-utilization"] != "0.95" {
		t.Errorf("its flags are %v", got)
	}
	if got := MaxModelLen(f.ConfigArgs(f.Sweep.Configs[0])); got != 16384 {
		t.Errorf("max-model-len is %d, want the value of server.args", got)
	}
}

// A key that is not in the file has the value that people used in sweeps made by hand.
func TestSweepDefaultsMatchTheManualSweeps(t *testing.T) {
	f := parse(t, sweepHead+"sweep: {configs: {default: {}}, concurrencies: [1, 2, 4]}\n")
	s := *f.Sweep
	if !slices.Equal(s.Concurrencies, []int{1, 2, 4}) || s.Rates != nil || s.Requests != 300 || s.WarmUp != (WarmUp{10, 0.5, 15 * time.Second}) ||
		s.Cooldown != 30*time.Second || s.Cache != trial.Carried || s.Seed != 1 {
		t.Errorf("the sweep is %+v", s)
	}
	if f := parse(t, full); f.Sweep != nil {
		t.Errorf("a file without a sweep has %+v", f.Sweep)
	}
}

// vLLM must not get flags of Dynamo itself, not even from a config of a sweep.
func TestSweepConfigsLoseDynamosFlags(t *testing.T) {
	text := strings.Replace(sweepHead, "[vllm, serve]", "[python3, -m, dynamo.vllm]", 1)
	f := parse(t, text+"sweep: {configs: {a: {args: [--max-num-seqs, 64, --is-prefill-worker]}}, rates: [1]}\n")
	if got := f.Sweep.Configs[0].Args; !slices.Equal(got, []string{"--max-num-seqs", "64"}) {
		t.Errorf("the config's args are %q", got)
	}
}
