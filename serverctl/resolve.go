package serverctl

import (
	"context"
	"maps"
	"net/http"
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

// resolvedArgs returns the values of the server's flags by name. It takes the flags of the command line, as the
// server's log shows them, and adds the values that /metrics shows. Those include defaults that the server chose by GPU
// and model. If the server does not tell a flag's value, the result lacks this flag; that is no error.
func (c *client) resolvedArgs(ctx context.Context, commandLine map[string]string) map[string]string {
	args := map[string]string{}
	maps.Copy(args, commandLine)
	a, err := c.call(ctx, http.MethodGet, "/metrics", nil, callTimeout)
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

// pythonPair matches a key and its value in a Python dict as vLLM prints it, such as: 'max_num_seqs': 8, 'model': '/m',
// 'speculative_config': {'method': 'ngram'}. If the value is itself a dict or list, without further nesting, it is
// matched as a whole.
var pythonPair = pattern(`'(\w+)': ('(?:[^'\\]|\\.)*'|\{[^{}]*\}|\[[^\[\]]*\]|[^,{}\[\]]+)`)

// parseNonDefault parses the dict of vLLM's log line "non-default args: {…}" (vllm/entrypoints/utils.py).
func parseNonDefault(dict string) map[string]string {
	args := map[string]string{}
	for _, pair := range pythonPair().FindAllStringSubmatch(strings.TrimSuffix(strings.TrimPrefix(dict, "{"), "}"), -1) {
		name := strings.ReplaceAll(pair[1], "_", "-")
		if name == "host" || name == "port" || name == "api-server-count" || SecretName(pair[1]) {
			continue // the tuner sets this flag, or its value is secret
		}
		args[name] = strings.Trim(pair[2], "'")
	}
	return args
}
