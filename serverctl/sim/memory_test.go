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

// The table has the sizes that the seven H200 servers logged at start-up.
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

func TestParseArgs(t *testing.T) {
	p := profile(t, "small-fast")
	for _, row := range []struct {
		name, args, want string // want is part of the error; "" means that it parses
		code             int
	}{
		{"no flags are the defaults", "my/model", "", 0},
		{"values may be joined with =", "my/model --max-num-seqs=64 --gpu_memory_utilization=0.8", "", 0},
		{"a boolean takes no value", "my/model --no-enable-prefix-caching --enforce-eager", "", 0},
		{"an unknown flag is named", "my/model --max-num-sequences 64", "unrecognized arguments: --max-num-sequences", 2},
		{"a word is no number", "my/model --max-num-seqs many", "argument --max-num-seqs: invalid int value: 'many'", 2},
		{"a value is missing", "my/model --max-num-seqs", "argument --max-num-seqs: expected one argument", 2},
		{"fewer batched tokens than sequences", "my/model --max-num-seqs 256 --max-num-batched-tokens 128", "max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256)", 1},
		{"a utilization above 1", "my/model --gpu-memory-utilization 1.2", "gpu_memory_utilization must be in (0, 1]", 1},
	} {
		_, err := p.ParseArgs(strings.Fields(row.args))
		code := 1
		if _, usage := errors.AsType[*UsageError](err); usage {
			code = 2
		}
		if row.want == "" {
			if err != nil {
				t.Errorf("%s: ParseArgs fails: %v", row.name, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), row.want) || code != row.code {
			t.Errorf("%s: ParseArgs = %v with code %d, want %q with code %d", row.name, err, code, row.want, row.code)
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
