package serverctl

import (
	"context"
	"maps"
	"net/http"
	"regexp"
	"strings"

	"vllmtuner/serverctl/exposition"
)

// cacheConfig is a gauge of value 1 whose labels are the fields of vLLM's CacheConfig (vllm/v1/metrics/loggers.py,
// 0.14.1 to 0.33.0).
const cacheConfig = "vllm:cache_config_info"

// resolvedFlags maps labels of cacheConfig to flag names. It has only the flags that a reader of a report wants to see.
var resolvedFlags = map[string]string{
	"gpu_memory_utilization": "gpu-memory-utilization",
	"block_size":             "block-size",
	"cache_dtype":            "kv-cache-dtype",
	"enable_prefix_caching":  "enable-prefix-caching",
	"kv_cache_memory_bytes":  "kv-cache-memory-bytes",
	"num_gpu_blocks":         "num-gpu-blocks",
}

// resolvedArgs returns the values of the server's flags by name, as far as the server tells them. Its log tells the
// flags of its command line. /metrics tells defaults that the server chose by GPU and model. A flag that the server
// does not tell is missing; that is no error.
func (s *Server) resolvedArgs(ctx context.Context) map[string]string {
	args := map[string]string{}
	maps.Copy(args, s.log.now().args)
	a, err := s.call(ctx, http.MethodGet, "/metrics", nil, callTimeout)
	if err != nil || a.status != http.StatusOK {
		return args
	}
	samples, _ := exposition.Parse(string(a.body)) // after an error there are no samples, and the command line must be enough
	for _, s := range samples {
		if s.Name != cacheConfig {
			continue
		}
		for label, value := range s.Labels {
			if flag := resolvedFlags[label]; flag != "" && value != "None" {
				args[flag] = value
			}
		}
	}
	return args
}

// pythonPair matches a pair of a Python dict as vLLM prints it: 'max_num_seqs': 8, 'model': '/m',
// 'speculative_config': {'method': 'ngram'}. It keeps one level of a nested dict or list as it is.
var pythonPair = regexp.MustCompile(`'(\w+)': ('(?:[^'\\]|\\.)*'|\{[^{}]*\}|\[[^\[\]]*\]|[^,{}\[\]]+)`)

// parseNonDefault parses the dict of vLLM's log line "non-default args: {…}" (vllm/entrypoints/utils.py).
func parseNonDefault(dict string) map[string]string {
	args := map[string]string{}
	for _, pair := range pythonPair.FindAllStringSubmatch(strings.TrimSuffix(strings.TrimPrefix(dict, "{"), "}"), -1) {
		name := strings.ReplaceAll(pair[1], "_", "-")
		if name == "host" || name == "port" || name == "api-server-count" || SecretName(pair[1]) {
			continue // set by the tuner, or secret
		}
		args[name] = strings.Trim(pair[2], "'")
	}
	return args
}
