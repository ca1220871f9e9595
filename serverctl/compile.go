package serverctl

import (
	"slices"
	"strconv"
	"strings"

	"vllmtuner/tuner/space"
)

// maxGraphSeqs limits the size of the largest CUDA graph, in sequences. That size is min(2 × max-num-seqs × (1 +
// speculative tokens), 512) (vllm/config/vllm.py, 0.14.1).
const maxGraphSeqs = 512

// neverCompiled lists the flags that never change compiled code. Whatever values they have, the compile cache hits
// (compute_hash in vllm/config/*.py of 0.14.1 and 0.33.0).
var neverCompiled = []string{
	"gpu-memory-utilization", "enable-prefix-caching", "no-enable-prefix-caching", "load-format", "seed", "host", "port",
	"served-model-name", "disable-log-stats", "download-dir", "long-prefill-token-threshold", "stream-interval", "api-key",
	"enable-server-load-tracking", "chat-template", "uvicorn-log-level",
}

// CompileKey returns a key for a server's compiled graphs. Servers of one vLLM version and model share compiled graphs
// if their flags give the same key. A server whose key was seen before loads its graphs from the cache. The key depends
// on the server's version, such as 0.14.1: from 0.15 on, and for unknown versions, the key always includes
// max-num-seqs.
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

// graphSeqs returns the size of the largest CUDA graph that a value of max-num-seqs gives, without speculation.
func graphSeqs(flag space.Flag) int {
	n, err := strconv.Atoi(strings.Join(flag.Values, " "))
	if err != nil {
		return 0
	}
	return min(2*n, maxGraphSeqs)
}
