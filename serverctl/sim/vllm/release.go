package vllm

import (
	"cmp"

	"vllmtuner/serverctl/sim"
)

// A release has the differences between versions of vLLM that a client or a reader of the log sees. They were compared
// with the logs and answers of 0.14.1 and 0.32.0 on a CPU (testdata/recordings). What only a GPU produces, and 0.33.0,
// were compared with the sources. Log records of all versions name the source files and lines of 0.14.1, which no
// program reads.
type release struct {
	version  string
	since032 bool     // 0.32.0 or later
	since033 bool     // 0.33.0 or later
	engine   string   // the engine's name in the log
	guarded  []string // prefixes of the paths that need a key

	cacheConfig map[string]string // labels of vllm:cache_config_info with constant values
}

var releases = map[string]*release{
	"0.14.1": {
		version: "0.14.1", engine: "EngineCore_DP0", guarded: []string{"/v1"},
		cacheConfig: map[string]string{
			"cache_dtype": "auto", "calculate_kv_scales": "False", "cpu_kvcache_space_bytes": "None", "cpu_offload_gb": "0.0",
			"is_attention_free": "False", "kv_cache_memory_bytes": "None", "kv_offloading_backend": "native", "kv_offloading_size": "None",
			"kv_sharing_fast_prefill": "False", "mamba_block_size": "None", "mamba_cache_dtype": "auto", "mamba_page_size_padded": "None",
			"mamba_ssm_cache_dtype": "auto", "num_cpu_blocks": "None", "num_gpu_blocks_override": "None", "prefix_caching_hash_algo": "sha256",
			"sliding_window": "None", "swap_space": "4.0",
		},
	},
	"0.32.0": releaseSince032("0.32.0"),
	"0.33.0": releaseSince032("0.33.0"),
}

func releaseSince032(version string) *release {
	r := &release{
		version: version, since032: true, engine: "EngineCore", guarded: []string{"/v1", "/v2", "/inference", "/cohere"},
		cacheConfig: map[string]string{
			"_block_size_resolved": "True", "cache_dtype": "auto", "cache_hit_alignment_tokens": "None",
			"enable_mamba_shared_prefix_checkpoint": "False", "hash_block_size": "None", "is_attention_free": "False",
			"kv_cache_dtype_skip_layers": "[]", "kv_cache_layout": "None", "kv_cache_memory_bytes": "None",
			"kv_offloading_backend": "native", "kv_offloading_size": "None", "kv_sharing_fast_prefill": "False",
			"mamba_block_size": "None", "mamba_cache_dtype": "auto", "mamba_cache_mode": "none", "mamba_page_size_padded": "None",
			"mamba_ssm_cache_dtype": "auto", "num_cpu_blocks": "None", "num_gpu_blocks_override": "None",
			"prefix_cache_retention_interval": "0", "prefix_caching_hash_algo": "sha256", "prefix_match_unit": "None",
			"replayssm_buffer_len": "16", "skip_page_size_padded": "None", "sliding_window": "None", "swa_bounded_replay": "True",
			"use_kda_recoverssm": "False", "use_replayssm": "False", "user_specified_block_size": "False",
		},
	}
	if version == "0.33.0" {
		r.since033 = true
		r.cacheConfig["simple_cpu_offload_num_blocks"] = "None"
	}
	return r
}

// releaseOf returns the release that the options name; options without a version mean the first.
func releaseOf(o sim.Options) *release {
	return releases[cmp.Or(o.Version, sim.Versions[0])]
}

// fingerprint returns the system fingerprint, which is nil before 0.32.0 (vllm/entrypoints/serve/utils/fingerprint.py).
// vLLM's fingerprint ends with a hash of its configuration; here the hash is always 0.
func (f *release) fingerprint() *string {
	if !f.since032 {
		return nil
	}
	text := "vllm-" + f.version + "-00000000"
	return &text
}
