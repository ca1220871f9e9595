package serverctl

import (
	"strings"
	"testing"
)

func TestCompileKeySharesGraphsAsVLLMDoes(t *testing.T) {
	for _, row := range []struct {
		name, version, a, b string
		same                bool
	}{
		{"the share of the GPU's memory compiles nothing", "0.14.1", "--gpu-memory-utilization 0.8", "--gpu-memory-utilization=0.95", true},
		{"nor does prefix caching", "0.33.0", "--enable-prefix-caching", "--no-enable-prefix-caching", true},
		{"nor the load format", "0.14.1", "--load-format dummy", "", true},
		{"the batch does", "0.14.1", "--max-num-batched-tokens 4096", "--max-num-batched-tokens 8192", false},
		{"sequences beyond the largest graph do not, in 0.14.1", "0.14.1", "--max-num-seqs 256", "--max-num-seqs 1024", true},
		{"two ways to write a flag are one", "0.14.1", "--block-size=16", "--block-size 16", true},
		{"fewer sequences do", "0.14.1", "--max-num-seqs 128", "--max-num-seqs 256", false},
		{"later versions hash the sequences themselves", "0.33.0", "--max-num-seqs 256", "--max-num-seqs 1024", false},
		{"bytes for the cache count in 0.14.1", "0.14.1", "--kv-cache-memory-bytes 1G", "--kv-cache-memory-bytes 2G", false},
		{"and not in later versions", "0.33.0", "--kv-cache-memory-bytes 1G", "--kv-cache-memory-bytes 2G", true},
		{"the order of flags is nothing", "0.14.1", "--dtype half --block-size 16", "--block-size 16 --dtype half", true},
		{"dashes and underscores are one", "0.14.1", "--gpu_memory_utilization 0.8", "", true},
	} {
		a, b := CompileKey(row.version, strings.Fields(row.a)), CompileKey(row.version, strings.Fields(row.b))
		if (a == b) != row.same {
			t.Errorf("%s: keys %q and %q, want the same: %v", row.name, a, b, row.same)
		}
	}
}
