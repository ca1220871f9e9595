package vllm

import (
	"cmp"

	"vllmtuner/serverctl/sim"
)

// A release is what a client and a reader of the log see of one version of vLLM. Its records and bodies were compared with the logs and
// answers of 0.14.1 and 0.32.0 on a CPU (testdata/recordings). Those that only a GPU produces, and those of 0.33.0, were compared with
// the sources of the version.
type release struct {
	version     string
	modern      bool   // 0.32.0 and later
	engine      string // the engine's name in the log
	log         records
	answers     answers
	guarded     []string          // prefixes of the paths that need a key
	cacheConfig map[string]string // constant labels of vllm:cache_config_info
}

// A logRecord is one line of the log: the process that writes it, its level, the file and line in vLLM's sources, and its text.
type logRecord struct {
	process, level, source, format string
}

func fromAPI(source, format string) logRecord { return logRecord{apiServer, "INFO", source, format} }
func fromEngine(source, format string) logRecord {
	return logRecord{engineCore, "INFO", source, format}
}

// records are the lines of a server's life in order, without those of failures. The version does not write a record without a format.
type records struct {
	serving, arguments, architecture, maxModelLen, chunkedPrefill, asyncScheduling logRecord
	initializing, loading, weights, loaded, cacheDirectory, compiled               logRecord
	kvMemory, kvSize, concurrency, graphs, initialized                             logRecord
	devMode, tasks, starting, routes, route                                        logRecord
	stopping                                                                       []logRecord
	stopped                                                                        []logRecord // when the engine has ended
	resetting, reset, notReset, wakingUp, askedAsleep                              logRecord

	logo    string // source of the logo, which replaces the record serving
	uvicorn bool   // uvicorn's lines begin with the process's name

	engineFailed, engineFatal, dumping, engineLost, outputFailed string // sources of the records of failures
	completionFailed, chatFailed                                 string
}

// The texts that are the same in all versions.
const (
	saysArguments    = "non-default args: %s"
	saysArchitecture = "Resolved architecture: %s"
	saysMaxModelLen  = "Using max model len %d"
	saysChunked      = "Chunked prefill is enabled with max_num_batched_tokens=%d."
	saysAsync        = "Asynchronous scheduling is enabled."
	saysInitializing = "Initializing a V1 LLM engine (v%s) with config: model='%s', simulated profile %s"
	saysWeights      = "Loading weights took %.2f seconds"
	saysLoaded       = "Model loading took %s GiB memory and %.6f seconds"
	saysDirectory    = "Using cache directory: %s for vLLM's torch.compile"
	saysKVMemory     = "Available KV cache memory: %s GiB"
	saysGraphs       = "Graph capturing finished in %.0f secs, took %.2f GiB"
	saysTasks        = "Supported tasks: ['generate']"
	saysRoutes       = "Available routes are:"
	saysRoute        = "Route: %s, Methods: %s"
	saysResetting    = "Resetting prefix cache..."
	saysReset        = "Successfully reset prefix cache"
	saysNotReset     = "Failed to reset prefix cache because some blocks (%d) are not freed yet"
	saysWakingUp     = "wake up the engine with tags: %s"
)

var releases = map[string]*release{
	"0.14.1": {
		version: "0.14.1", engine: "EngineCore_DP0",
		answers: oldAnswers, guarded: []string{"/v1"},
		log: records{
			serving:         fromAPI("api_server.py:1272", "vLLM API server version %s"),
			arguments:       fromAPI("utils.py:263", saysArguments),
			architecture:    fromAPI("model.py:530", saysArchitecture),
			maxModelLen:     fromAPI("model.py:1545", saysMaxModelLen),
			chunkedPrefill:  fromAPI("scheduler.py:229", saysChunked),
			asyncScheduling: fromAPI("vllm.py:630", saysAsync),
			initializing:    fromEngine("core.py:97", saysInitializing),
			loading:         fromEngine("gpu_model_runner.py:3808", "Starting to load model %s..."),
			weights:         fromEngine("default_loader.py:291", saysWeights),
			loaded:          fromEngine("gpu_model_runner.py:3905", saysLoaded),
			cacheDirectory:  fromEngine("backends.py:644", saysDirectory),
			compiled:        fromEngine("monitor.py:34", "torch.compile takes %.2f s in total"),
			kvMemory:        fromEngine("gpu_worker.py:358", saysKVMemory),
			kvSize:          fromEngine("kv_cache_utils.py:1305", "GPU KV cache size: %s tokens"),
			concurrency:     fromEngine("kv_cache_utils.py:1310", "Maximum concurrency for %s tokens per request: %.2fx"),
			graphs:          fromEngine("gpu_model_runner.py:4856", saysGraphs),
			initialized:     fromEngine("core.py:273", "init engine (profile, create kv cache, warmup model) took %.2f seconds"),
			devMode: logRecord{apiServer, "WARNING", "__init__.py:14", "SECURITY WARNING: Development endpoints are enabled! " +
				"This should NOT be used in production!"},
			tasks:     fromAPI("api_server.py:1014", saysTasks),
			starting:  fromAPI("api_server.py:1346", "Starting vLLM API server 0 on http://%s"),
			routes:    fromAPI("launcher.py:38", saysRoutes),
			route:     fromAPI("launcher.py:46", saysRoute),
			stopping:  []logRecord{fromAPI("launcher.py:110", "Shutting down FastAPI HTTP server.")},
			resetting: fromAPI("api_router.py:39", saysResetting),
			reset:     fromEngine("block_pool.py:451", saysReset),
			notReset:  logRecord{engineCore, "WARNING", "block_pool.py:434", saysNotReset},
			wakingUp:  fromAPI("api_router.py:38", saysWakingUp), askedAsleep: fromAPI("api_router.py:47", "check whether the engine is sleeping"),
			uvicorn:      true,
			engineFailed: "core.py:936", engineFatal: "core.py:938", dumping: "dump_input.py:72", engineLost: "core_client.py:610",
			outputFailed: "async_llm.py:546", completionFailed: "serving_completion.py:512", chatFailed: "serving_chat.py:1343",
		},
		cacheConfig: map[string]string{
			"cache_dtype": "auto", "calculate_kv_scales": "False", "cpu_kvcache_space_bytes": "None", "cpu_offload_gb": "0.0",
			"is_attention_free": "False", "kv_cache_memory_bytes": "None", "kv_offloading_backend": "native", "kv_offloading_size": "None",
			"kv_sharing_fast_prefill": "False", "mamba_block_size": "None", "mamba_cache_dtype": "auto", "mamba_page_size_padded": "None",
			"mamba_ssm_cache_dtype": "auto", "num_cpu_blocks": "None", "num_gpu_blocks_override": "None", "prefix_caching_hash_algo": "sha256",
			"sliding_window": "None", "swap_space": "4.0",
		},
	},
	"0.32.0": modernRelease("0.32.0", records{
		logo:           "api_utils.py:347",
		serving:        fromAPI("api_utils.py:347", saysServing),
		arguments:      fromAPI("api_utils.py:286", saysArguments),
		architecture:   fromAPI("model.py:733", saysArchitecture),
		maxModelLen:    fromAPI("model.py:2152", saysMaxModelLen),
		initializing:   fromEngine("core.py:133", saysInitializing),
		loading:        fromEngine("model_runner.py:392", saysLoading),
		weights:        fromEngine("default_loader.py:501", saysWeights),
		loaded:         fromEngine("model_runner.py:424", saysLoaded),
		cacheDirectory: fromEngine("backends.py:1104", saysDirectory),
		compiled:       fromEngine("monitor.py:61", saysCompiled),
		kvMemory:       fromEngine("gpu_worker.py:759", saysKVMemory),
		kvSize:         fromEngine("kv_cache_utils.py:2327", saysKVSize),
		graphs:         fromEngine("model_runner.py:1127", saysGraphs),
		initialized:    fromEngine("core.py:395", saysInitialized),
		devMode:        logRecord{apiServer, "WARNING", "__init__.py:44", saysDevMode},
		tasks:          fromAPI("entry.py:136", saysTasks),
		starting:       fromAPI("entry.py:140", saysStarting),
		routes:         fromAPI("launcher.py:186", saysRoutes),
		route:          fromAPI("launcher.py:195", saysRoute),
		stopping:       modernStopping("launcher.py:254", "launcher.py:270", "core_client.py:770", "core_client.py:772"),
		stopped:        modernStopped("core_client.py:774", "core_client.py:775", "core_client.py:777", "launcher.py:279", "launcher.py:282", "launcher.py:304"),
		resetting:      fromAPI("api_router.py:39", saysResetting),
		reset:          fromEngine("block_pool.py:861", saysReset),
		notReset:       logRecord{engineCore, "WARNING", "block_pool.py:839", saysNotReset},
		wakingUp:       fromAPI("api_router.py:50", saysWakingUp),
		engineFailed:   "core.py:1510", engineFatal: "core.py:1512", dumping: "dump_input.py:72", engineLost: "core_client.py:817",
		outputFailed: "async_llm.py:906", completionFailed: "serving.py:500", chatFailed: "serving.py:929",
	}, modernAnswers),
	"0.33.0": modernRelease("0.33.0", records{
		logo:           "startup.py:38",
		serving:        fromAPI("startup.py:38", saysServing),
		arguments:      fromAPI("startup.py:96", saysArguments),
		architecture:   fromAPI("model.py:744", saysArchitecture),
		maxModelLen:    fromAPI("model.py:2170", saysMaxModelLen),
		initializing:   fromEngine("core.py:139", saysInitializing),
		loading:        fromEngine("model_runner.py:399", saysLoading),
		weights:        fromEngine("default_loader.py:506", saysWeights),
		loaded:         fromEngine("model_runner.py:428", saysLoaded),
		cacheDirectory: fromEngine("backends.py:1125", saysDirectory),
		compiled:       fromEngine("monitor.py:61", saysCompiled),
		kvMemory:       fromEngine("gpu_worker.py:772", saysKVMemory),
		kvSize:         fromEngine("kv_cache_utils.py:1147", saysKVSize),
		graphs:         fromEngine("model_runner.py:1163", saysGraphs),
		initialized:    fromEngine("core.py:405", saysInitialized),
		devMode:        logRecord{apiServer, "WARNING", "__init__.py:44", saysDevMode},
		tasks:          fromAPI("entry.py:135", saysTasks),
		starting:       fromAPI("entry.py:139", saysStarting),
		routes:         fromAPI("launcher.py:188", saysRoutes),
		route:          fromAPI("launcher.py:197", saysRoute),
		stopping:       modernStopping("launcher.py:256", "launcher.py:272", "core_client.py:792", "core_client.py:794"),
		stopped:        modernStopped("core_client.py:796", "core_client.py:797", "core_client.py:799", "launcher.py:281", "launcher.py:284", "launcher.py:306"),
		resetting:      fromAPI("api_router.py:39", saysResetting),
		reset:          fromEngine("block_pool.py:905", saysReset),
		notReset:       logRecord{engineCore, "WARNING", "block_pool.py:883", saysNotReset},
		wakingUp:       fromAPI("api_router.py:50", saysWakingUp),
		engineFailed:   "core.py:1584", engineFatal: "core.py:1586", dumping: "dump_input.py:72", engineLost: "core_client.py:839",
		outputFailed: "async_llm.py:943", completionFailed: "serving.py:555", chatFailed: "serving.py:952",
	}, latestAnswers()),
}

// The texts of 0.32.0 and 0.33.0. On a GPU both use their second model runner by default (v1/worker/gpu/model_runner.py), which logs
// saysLoading and not "Starting to load model".
const (
	saysServing     = "vLLM server version %s, serving model %s"
	saysLoading     = "Loading model from scratch..."
	saysCompiled    = "torch.compile took %.2f s in total"
	saysKVSize      = "GPU KV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx"
	saysInitialized = "init engine (profile, create kv cache, warmup model) took %.2f s (compilation: %.2f s)"
	saysDevMode     = "SECURITY WARNING: Development endpoints are enabled! This should NOT be used in production!"
	saysStarting    = "Starting vLLM server on http://%s"
)

func modernRelease(version string, log records, a answers) *release {
	f := &release{
		version: version, modern: true, engine: "EngineCore", log: log,
		answers: a, guarded: []string{"/v1", "/v2", "/inference", "/cohere"},
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
		f.cacheConfig["simple_cpu_offload_num_blocks"] = "None"
	}
	return f
}

// modernStopping returns the records before the engine ends, for the given sources.
func modernStopping(triggered, mode, start, stopping string) []logRecord {
	return []logRecord{
		fromAPI(triggered, "[shutdown] API server: shutdown triggered"),
		fromAPI(mode, "[shutdown] API server: stopping engine client mode=abort timeout=0s"),
		fromAPI(start, "[shutdown] MPClient: start timeout=0s"),
		fromAPI(stopping, "[shutdown] MPClient: stopping engine manager"),
	}
}

// modernStopped returns the records after the engine has ended, for the given sources.
func modernStopped(stopped, cleaning, complete, client, signalling, shutting string) []logRecord {
	return []logRecord{
		fromAPI(stopped, "[shutdown] MPClient: engine manager stopped"),
		fromAPI(cleaning, "[shutdown] MPClient: cleaning up background resources"),
		fromAPI(complete, "[shutdown] MPClient: complete"),
		fromAPI(client, "[shutdown] API server: engine client stopped"),
		fromAPI(signalling, "[shutdown] API server: signalling HTTP server shutdown"),
		fromAPI(shutting, "[shutdown] API server: shutting down FastAPI HTTP server"),
	}
}

// releaseOf returns the release that the options name; options without a version mean the first.
func releaseOf(o sim.Options) *release {
	return releases[cmp.Or(o.Version, sim.Versions[0])]
}

// fingerprint returns the system fingerprint of later versions (vllm/entrypoints/serve/utils/fingerprint.py). Its hash is 0, because
// there is no configuration to hash.
func (f *release) fingerprint() string { return "vllm-" + f.version + "-00000000" }
