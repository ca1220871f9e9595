package sim

import (
	"errors"
	"math"
	"strings"
	"testing"
)

func profile(t testing.TB, name string) *Profile {
	t.Helper()
	p, err := LoadProfile(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The table has the KV cache sizes that the seven H200 servers logged at start-up.
func TestKVSizesOfTheMeasuredServers(t *testing.T) {
	p := profile(t, "h200-llama70b-fp8")
	for _, row := range []struct {
		name            string
		util            float64
		batched, seqs   int
		want, tolerance float64
	}{
		{"default", 0.9, 8192, 1024, 53.15, 0.01},
		{"more memory", 0.95, 8192, 1024, 60.14, 0.01},
		{"twice the prefill budget", 0.9, 16384, 1024, 53.02, 0.015},
		{"fewer sequences", 0.9, 8192, 128, 56.39, 0.01},
		{"moderate", 0.95, 16384, 128, 61.79, 0.015},
		{"aggressive", 0.95, 32768, 256, 56.85, 0.01},
	} {
		got := p.KVGiB(Options{GPUMemoryUtilization: row.util, MaxNumBatchedTokens: row.batched, MaxNumSeqs: row.seqs})
		if math.Abs(got-row.want) > row.tolerance {
			t.Errorf("%s: KVGiB = %.3f, want %.2f", row.name, got, row.want)
		}
	}
}

func TestRefusalsToStart(t *testing.T) {
	p := profile(t, "h200-llama70b-fp8")
	for _, row := range []struct {
		name string
		o    Options
		oom  bool
		text string
	}{
		{"the weights alone need more", Options{GPUMemoryUtilization: 0.4, MaxNumSeqs: 8, MaxNumBatchedTokens: 1024, MaxModelLen: 1024}, false, "No available memory for the cache blocks"},
		{"one request of max-model-len does not fit", Options{GPUMemoryUtilization: 0.55, MaxNumSeqs: 8, MaxNumBatchedTokens: 1024, MaxModelLen: 131072}, false, "To serve at least one request with the models's max seq len (131072)"},
		{"no room is left for CUDA graphs", Options{GPUMemoryUtilization: 0.99, MaxNumSeqs: 8, MaxNumBatchedTokens: 1024, MaxModelLen: 16384}, true, "CUDA out of memory"},
	} {
		_, err := NewEngine(p, row.o)
		start, ok := errors.AsType[*StartError](err)
		if !ok || start.OOM != row.oom || !strings.Contains(start.Text, row.text) {
			t.Errorf("%s: NewEngine gives %v, want a start error (OOM %v) with %q", row.name, err, row.oom, row.text)
		}
	}
}

func TestProfileUnknown(t *testing.T) {
	_, err := LoadProfile("h100")
	if err == nil || !strings.Contains(err.Error(), "use one of h200-llama70b-fp8, h200-llama70b-fp8-reset, l4-qwen0.5b, small-fast") {
		t.Errorf("LoadProfile(h100) = %v, want the list of profiles", err)
	}
}

// quiet returns the profile without noise.
func (p *Profile) quiet() *Profile {
	quiet := *p
	quiet.Noise = Noise{}
	return &quiet
}
