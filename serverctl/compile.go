package serverctl

import (
	"slices"
	"strconv"
	"strings"

	"vllmtuner/tuner/space"
)

// mostGraphSeqs is the number of sequences from which on the list of CUDA-graph sizes does not change any more: its largest
// size is min(2 × max-num-seqs × (1 + speculative tokens), 512) (vllm/config/vllm.py, 0.14.1).
const mostGraphSeqs = 512

// neverCompiled are the flags that change nothing that is compiled: the compile cache hits whatever they are
// (compute_hash in vllm/config/*.py of 0.14.1 and 0.33.0).
var neverCompiled = []string{
	"gpu-memory-utilization", "enable-prefix-caching", "no-enable-prefix-caching", "load-format", "seed", "host", "port",
	"served-model-name", "disable-log-stats", "download-dir", "long-prefill-token-threshold", "stream-interval", "api-key",
	"enable-server-load-tracking", "chat-template", "uvicorn-log-level",
}

// CompileKey returns a text that is the same for two servers of one vLLM version and model whose start can share compiled
// graphs, as far as their flags tell: a start whose key was seen before loads them from the cache. version is the
// server's, such as 0.14.1. From 0.15 on, and for unknown versions, max-num-seqs is always part of it.
func CompileKey(version string, args []string) string {
	flags, err := space.Flags(args)
	if err != nil {
		return ""
	}
	var parts []string
	for _, flag := range flags {
		name, _, _ := strings.Cut(flag.Name, ".")
		switch {
		case slices.Contains(neverCompiled, name):
		case name == "max-num-seqs" && strings.HasPrefix(version, "0.14."):
			parts = append(parts, "graphs "+strconv.Itoa(graphSeqs(flag)))
		case name == "kv-cache-memory-bytes" && !strings.HasPrefix(version, "0.14."):
		default:
			parts = append(parts, strings.Join(append([]string{flag.Name}, flag.Values...), " "))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, "; ")
}

// graphSeqs is the largest graph that a max-num-seqs asks for, without speculation.
func graphSeqs(flag space.Flag) int {
	n, err := strconv.Atoi(strings.Join(flag.Values, " "))
	if err != nil {
		return 0
	}
	return min(2*n, mostGraphSeqs)
}
