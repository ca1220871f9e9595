package serverctl

import (
	"context"
	"net/http"
	"regexp"
	"strings"
)

// cacheConfig is a gauge of value 1 whose labels are the fields of vLLM's CacheConfig (vllm/v1/metrics/loggers.py,
// 0.14.1 to 0.33.0).
const cacheConfig = "vllm:cache_config_info"

// resolvedFlags are the labels of cacheConfig that a reader knows as flags, or wants to know.
var resolvedFlags = map[string]string{
	"gpu_memory_utilization": "gpu-memory-utilization",
	"block_size":             "block-size",
	"cache_dtype":            "kv-cache-dtype",
	"enable_prefix_caching":  "enable-prefix-caching",
	"kv_cache_memory_bytes":  "kv-cache-memory-bytes",
	"num_gpu_blocks":         "num-gpu-blocks",
}

var label = regexp.MustCompile(`(\w+)="((?:[^"\\]|\\.)*)"`)

// resolvedArgs returns what the server's flags came to, by flag name, as far as it tells: those that its command line gave
// and, from /metrics, defaults that it chose by GPU and model. Unknown is an honest answer: there is no error.
func (s *Server) resolvedArgs(ctx context.Context) map[string]string {
	args := s.log.nonDefault()
	a, err := s.call(ctx, http.MethodGet, "/metrics", nil, callTimeout)
	if err != nil || a.status != http.StatusOK {
		return args
	}
	for line := range strings.Lines(string(a.body)) {
		if name, _, ok := sample(line); !ok || name != cacheConfig {
			continue
		}
		for _, l := range label.FindAllStringSubmatch(line, -1) {
			if flag := resolvedFlags[l[1]]; flag != "" && l[2] != "None" {
				args[flag] = l[2]
			}
		}
	}
	return args
}

// A pair of a Python dict as vLLM prints it: 'max_num_seqs': 8, 'model': '/m', 'speculative_config': {'method': 'ngram'}.
// One level of a nested dict or list is kept as it stands.
var pythonPair = regexp.MustCompile(`'(\w+)': ('(?:[^'\\]|\\.)*'|\{[^{}]*\}|\[[^\[\]]*\]|[^,{}\[\]]+)`)

// parseNonDefault reads the dict of vLLM's log line "non-default args: {…}" (vllm/entrypoints/utils.py).
func parseNonDefault(dict string) map[string]string {
	args := map[string]string{}
	for _, pair := range pythonPair.FindAllStringSubmatch(strings.TrimSuffix(strings.TrimPrefix(dict, "{"), "}"), -1) {
		name := strings.ReplaceAll(pair[1], "_", "-")
		if name == "host" || name == "port" || name == "api-server-count" || SecretName(pair[1]) {
			continue // the tuner's own, and what nobody should read
		}
		args[name] = strings.Trim(pair[2], "'")
	}
	return args
}
