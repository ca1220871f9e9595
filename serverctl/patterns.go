package serverctl

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// This file has the patterns for a server's log. The file outside.go has the patterns for a server that somebody ended
// from outside. The comment on a pattern names the version and the file of vLLM in which the text was seen. "0.33"
// means 0.33.0. If the comment names no version, the text was the same in 0.14.1 and 0.33.0. factPatterns,
// phasePatterns and deathPatterns match what is left of a line without colours, without the process's prefix, and
// without level, date and source location.

// pattern returns a regular expression that is compiled at its first use. Most commands read no log, and compiling all
// patterns takes 3 ms. The tests have lines that no pattern matches, so all patterns are compiled there.
func pattern(expr string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
}

var (
	// vllm/logger.py and vllm/utils/system_utils.py write lines such as the next one. 0.14.1 colours the prefix even
	// without a terminal.
	// (EngineCore_DP0 pid=123) ERROR 11-20 21:23:37 [core.py:936] text
	colours       = pattern("\x1b\\[[0-9;]*[A-Za-z]")
	processPrefix = pattern(`^(?:\([^()]* ?pid=\d+[^()]*\) ?)+(?:\[rank\d+\]: ?)?|^\[rank\d+\]: ?`)
	levelPrefix   = pattern(`^(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?: \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*|[\w./-]+:\d+)\] ?|: +)`) // vLLM 0.6 and 0.7 write no bracket
	// Dynamo's runtime writes vLLM's log records in its own format (dynamo/runtime/logging.py, 0.9.0). An image of
	// Dynamo may set this format for plain vLLM too:
	// 2025-11-20T19:48:19.123456Z  INFO core.run_engine_core: text
	dynamoPrefix = pattern(`^\d{4}-\d\d-\d\dT[\d:.]+Z? +(TRACE|DEBUG|INFO|WARN|WARNING|ERROR) +[\w.:<>-]+: ?`)
	// ofEngine matches lines of the engine's processes. It knows them by their prefix or by their source file in vLLM.
	ofEngine = pattern(`^(?:\([^()]*pid=\d+[^()]*\) ?)*\((?:EngineCore|DPEngine|Worker|VllmWorker|RayWorker)|` +
		`\[(?:\S*/)?(?:core|multiproc_executor|gpu_worker|worker_base|gpu_model_runner)\.py:\d+\]`)
	// accessLine matches successful requests in uvicorn's access log. They explain nothing, and health checks would
	// fill the tail.
	accessLine = pattern(`"(?:GET|POST|HEAD) \S+ HTTP/[\d.]+" 200`)
)

// maxUnknown limits how many unknown variables are kept. Container images set some that only the makers of the image
// read.
const maxUnknown = 100

// A fact is a pattern for a log line about a starting server, with a function that stores what the line tells.
type fact struct {
	text func() *regexp.Regexp
	read func(f *Facts, groups []string)
}

var factPatterns = []fact{
	// 0.14.1 writes this line in vllm/entrypoints/openai/api_server.py. 0.33 writes it if VLLM_DISABLE_LOG_LOGO=1 is
	// set.
	{pattern(`vLLM (?:API )?server version (\S+?),?(?: |$)`), func(f *Facts, g []string) { f.Version = g[1] }},
	// vllm/v1/engine/core.py (seen in 0.14.1 and 0.32.0). This line tells the version when the command line starts the
	// engine in another way. The project's simulator adds its profile to the line, which shows that the server is
	// simulated.
	{pattern(`Initializing a V1 LLM engine \(v(\S+)\)(.* simulated profile )?`), func(f *Facts, g []string) {
		if f.Version == "" {
			f.Version = g[1]
		}
		f.Simulated = f.Simulated || g[2] != ""
	}},
	// vllm/v1/core/kv_cache_utils.py. The line begins with the device, such as GPU. 0.33 writes tokens and concurrency
	// on one line.
	{pattern(`KV cache size: ([\d,]+) tokens`), func(f *Facts, g []string) { keepMin(&f.KVCacheTokens, int(parseFigure(g[1]))) }},
	{pattern(`Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x`),
		func(f *Facts, g []string) { keepMin(&f.MaxConcurrency, parseFigure(g[1])) }},
	// vllm/v1/worker/gpu_worker.py, once per rank.
	{pattern(`Available KV cache memory: (-?[\d.]+) GiB`), func(f *Facts, g []string) { keepMin(&f.KVCacheGiB, parseFigure(g[1])) }},
	// vllm/v1/worker/gpu_model_runner.py. Only 0.14.1 adds the word "memory".
	{pattern(`Model loading took ([\d.]+) GiB`), func(f *Facts, g []string) { f.ModelGiB = parseFigure(g[1]) }},
	{pattern(`Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB`), func(f *Facts, g []string) { f.GraphGiB = parseFigure(g[1]) }},
	// vllm/compilation/backends.py. For a graph from the compile cache, vLLM writes "Directly load" instead. 0.33
	// writes "took" where 0.14.1 writes "takes".
	{pattern(`Compiling a graph for (?:compile range|dynamic shape|shape) .*(?:takes|took) [\d.]+ s`), func(f *Facts, _ []string) { f.Compiled = true }},
	// vllm/envs.py, seen in logs of 0.20 and 0.23. A version without this line ignores an unknown variable silently.
	{pattern(`^Unknown vLLM environment variable detected: ([A-Z][A-Z0-9_]*)$`), func(f *Facts, g []string) {
		if len(f.UnknownVariables) < maxUnknown && !slices.Contains(f.UnknownVariables, g[1]) {
			f.UnknownVariables = append(f.UnknownVariables, g[1])
		}
	}},
}

// parseFigure parses a number of the log, with commas between thousands. The patterns also match malformed numbers such
// as 1.2.3; for such numbers parseFigure returns 0, which means unknown.
func parseFigure(s string) float64 {
	v, err := strconv.ParseFloat(strings.ReplaceAll(s, ",", ""), 64)
	if err != nil {
		return 0
	}
	return v
}

// keepMin keeps the smallest of the values that the ranks report. 0 means that no value is known yet.
func keepMin[N int | float64](to *N, v N) {
	if *to == 0 || v < *to {
		*to = v
	}
}

// kvAvailable matches the size of the KV cache in the error of a server that refuses to start; see deathPatterns.
var kvAvailable = pattern(`available KV cache memory \((-?[\d.]+) GiB\)`)

// AvailableKVGiB returns the size of the available KV cache in GiB, or nil if the line does not tell it. The line comes
// from the log of a failed start with the class KVTooSmall, or is the evidence of such a failure.
func AvailableKVGiB(line string) *float64 {
	m := kvAvailable().FindStringSubmatch(line)
	if m == nil {
		return nil
	}
	gib, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return nil
	}
	return &gib
}

// A phase is a step of a start, shown to users who wait for minutes.
type phase struct {
	text func() *regexp.Regexp
	name string
}

const (
	// firstPhase is the phase of a start until the log names another.
	firstPhase   = "importing and configuring"
	loadingPhase = "loading the weights"
)

// vllm/model_executor/model_loader/weight_utils.py draws a progress bar of the weight files, such as:
// Loading safetensors checkpoint shards:  25% Completed | 1/4
var shardsLoaded = pattern(`Loading \S+ checkpoint shards: +(\d{1,3})% Completed`)

var phasePatterns = []phase{
	{pattern(`Starting to load model`), loadingPhase},                      // vllm/v1/worker/gpu_model_runner.py
	{pattern(`Loading model from scratch`), loadingPhase},                  // vllm/v1/worker/gpu/model_runner.py, used by 0.32 and 0.33 on a GPU
	{pattern(`Model loading took `), "profiling memory"},                   // vllm/v1/worker/gpu_model_runner.py
	{pattern(`Using cache directory: .* torch\.compile`), "compiling"},     // vllm/compilation/backends.py
	{pattern(`torch\.compile (?:takes|took) `), "profiling memory"},        // vllm/compilation/monitor.py
	{pattern(`KV cache size: `), "capturing graphs and warming up"},        // vllm/v1/core/kv_cache_utils.py
	{pattern(`Starting vLLM (?:API )?server`), "starting the HTTP server"}, // vllm/entrypoints
}

// A death is a pattern for a log line that tells why a server failed. If several patterns match a line, the first one
// in the table counts. If several lines of a log match, the first line counts, because later exceptions only wrap the
// first. Group 1 of the pattern, if there is one, is the evidence.
type death struct {
	text   func() *regexp.Regexp
	start  Class // class of the failure before the server is ready; empty when the line is no failure at that time
	load   Class // class of the failure under load; empty when the line is no failure at that time
	cause  Cause // empty when the class says everything
	refine func(e *ExitError, groups []string)
}

// argparse matches the beginning of each error that argparse writes about a command line.
const argparse = `(?:argument |unrecognized arguments|ambiguous option|the following arguments)`

var deathPatterns = []death{
	// Texts of create_server_socket in vllm/entrypoints/openai/api_server.py, and of torch.distributed for its own
	// ports.
	{text: pattern(`.*(?:Address already in use|EADDRINUSE).*`), start: PortTaken},

	// The model exists, but these credentials may not read it (huggingface_hub/errors.py and transformers/utils/hub.py,
	// read in huggingface_hub 0.36 and transformers 4.57).
	{text: pattern(`.*(?:GatedRepoError|You are trying to access a gated repo|Access to model \S+ is restricted|Cannot access gated repo).*`),
		start: ModelNotFound, cause: GatedModel},

	// Python's texts for errno 28, 122, 24, 11, 13, 30, 5 and 116. Such errors can come when a file is written or
	// opened, or a thread is started.
	{text: pattern(`.*(?:\[Errno 28\]|No space left on device|\[Errno 122\]|Disk quota exceeded|unable to write to file </torch_|out of shared memory).*`),
		start: Infrastructure, load: Infrastructure, cause: DiskFull},
	{text: pattern(`.*(?:\[Errno 24\]|Too many open files).*`), start: Infrastructure, load: Infrastructure, cause: TooManyFiles},
	{text: pattern(`.*(?:can't start new thread|pthread_create failed|Thread creation failed|\[Errno 11\] Resource temporarily unavailable).*`),
		start: Infrastructure, load: Infrastructure, cause: TooManyProc},
	{text: pattern(`^PermissionError: .*|.*(?:\[Errno 13\] Permission denied|\[Errno 30\] Read-only file system).*`), start: Infrastructure, cause: NotAllowed},
	{text: pattern(`.*(?:\[Errno 5\] Input/output error|\[Errno 116\] Stale file handle|Stale NFS file handle).*`),
		start: Infrastructure, load: Infrastructure, cause: DiskError},

	// The host has no memory left (texts of torch's CPU allocator, of C++, and of Python for errno 12). Flags for the
	// GPU's memory do not cure this.
	{text: pattern(`.*(?:DefaultCPUAllocator: .*memory|std::bad_alloc|\[Errno 12\] Cannot allocate memory|^MemoryError\b).*`),
		start: Infrastructure, load: Infrastructure, cause: HostOOM},

	// A program is missing (texts of Python, of the dynamic linker and of the shell).
	{text: pattern(`.*(?:can't open file '.*': \[Errno 2\]|: No module named vllm\b|^ModuleNotFoundError: No module named 'vllm(?:\.entrypoints\b.*)?'|` +
		`error while loading shared libraries: .*|: bad interpreter: .*)`), start: Infrastructure, cause: Command},

	// The GPU, or its driver, does not work (torch/cuda/__init__.py, c10/cuda/CUDAException.h with the names of
	// driver_types.h, vllm/config/device.py).
	{text: pattern(`.*(?:CUDA driver initialization failed|No (?:CUDA|HIP) GPUs are available|no ROCm-capable device is detected|Found no NVIDIA driver|NVIDIA driver on your system is too old|` +
		`CUDA driver version is insufficient|system has unsupported display driver|forward compatibility was attempted|no CUDA-capable device is detected|` +
		`CUDA-capable device\(s\) is/are busy|CUDA error: (?:unknown error|initialization error|system not yet initialized|driver shutting down)|` +
		`uncorrectable (?:NVLink|ECC) error|hardware stack error|compiled with an unsupported toolchain|Torch not compiled with CUDA enabled|Failed to infer device type|Driver/library version mismatch|GPU is lost|fallen off the bus|` +
		`libcuda\.so\.1: cannot open shared object file|NVML_ERROR_\w+|NVMLError\w*:? ).*`), start: Infrastructure, load: Infrastructure, cause: Driver},

	// A text of libtpu. The failure gets no Cause, because the remedy for a GPU's driver does not apply.
	{text: pattern(`.*The TPU is already in use.*`), start: Infrastructure},
	// Weights are truncated or damaged (texts of safetensors and torch.load).
	{text: pattern(`.*(?:SafetensorError|Error while deserializing header|PytorchStreamReader failed|unexpected EOF, expected \d+ more bytes).*`),
		start: ModelNotFound, cause: Damaged},
	// The model brings its own code (transformers/dynamic_module_utils.py, vllm/transformers_utils/config.py).
	{text: pattern(`.*(?:trust_remote_code=True|--trust-remote-code).*`), start: ModelNotFound, cause: RemoteCode},
	// The architecture is unknown (transformers/models/auto/configuration_auto.py,
	// vllm/model_executor/models/registry.py).
	{text: pattern(`.*(?:Transformers does not recognize this architecture|Model architectures \[.*\] (?:are not supported|failed to be inspected)|` +
		`has no vLLM implementation).*`), start: ModelNotFound, cause: Unsupported},
	// Texts of requests and urllib3 about a proxy that blocks the connection. This pattern comes before the next,
	// because a 403 of the proxy is not a 403 of the hub.
	{text: pattern(`.*(?:ProxyError\b|Unable to connect to proxy|Tunnel connection failed).*`), start: ModelNotFound, cause: Hub},
	// The first pattern means that the hub refuses missing or wrong credentials. The second pattern means that there is
	// no network (texts of requests and httpx).
	{text: pattern(`.*(?:401 Client Error|403 Forbidden|Invalid username or password|Invalid user token).*`), start: ModelNotFound, cause: GatedModel},
	{text: pattern(`.*(?:couldn't connect to 'https://huggingface\.co|Failed to resolve 'huggingface|host='huggingface\.co'|OfflineModeIsEnabled|` +
		`LocalEntryNotFoundError|Cannot find an appropriate cached snapshot folder).*`), start: ModelNotFound, cause: Hub},

	// There is no model. huggingface_hub writes some of these texts for a missing folder, through
	// vllm/transformers_utils/repo_utils.py (seen in 0.14.1). transformers and vLLM write the others for a folder that
	// holds no model.
	{text: pattern(`.*(?:Repo id must be in the form|` +
		`Invalid repository ID or local directory specified|does not appear to have a file named|` +
		`is not a local folder and is not a valid model identifier|Can't load the (?:configuration|tokenizer|model) (?:of|for)|` +
		`RepositoryNotFoundError: |RevisionNotFoundError: |EntryNotFoundError: |Cannot find any model weights|is not a valid JSON file|` +
		`No model weights found|Unrecognized model in ).*`),
		start: ModelNotFound},

	// argparse exits with code 2 after a line such as: vllm serve: error: argument --max-num-seqs: invalid int value:
	// 'abc' (0.14.1).
	{text: pattern(`: error: (` + argparse + `.*)`), start: FlagsRejected, refine: func(e *ExitError, _ []string) { e.Argparse = true }},
	// pydantic writes the reason on the line after "1 validation error for SchedulerConfig" (0.14.1, vllm/config/*.py).
	{text: pattern(`^ +(?:Value error, |Assertion failed, )?(.+?) \[type=\w+, input_value=`), start: FlagsRejected},

	// vllm/v1/core/kv_cache_utils.py; in 0.33 kv_cache_planning.py. 0.14.1 writes "models's".
	{text: pattern(`(To serve at least one request with the models?'s max seq len .*?GiB KV cache is needed, ` +
		`which is larger than the available KV cache memory .*)`), start: KVTooSmall, refine: func(e *ExitError, g []string) { e.KVGiB = AvailableKVGiB(g[1]) }},
	{text: pattern(`(No available memory for the cache blocks.*|The model's max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache.*)`), start: KVTooSmall},

	// vllm/v1/worker/utils.py (0.33) and gpu_worker.py. memoryOfOthers decides whether the point or another process is
	// at fault.
	{text: pattern(`(Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory utilization.*)`),
		start: OOMStart, refine: memoryOfOthers},
	// vllm/v1/worker/gpu_worker.py: another process gave memory back while vLLM measured how much is free.
	{text: pattern(`(Error in memory profiling\..*)`), start: Infrastructure, cause: Profiling},

	// The GPU is out of memory (texts of torch 2.9 and 2.14, with an older name of its exception, of Triton, cuBLAS,
	// NCCL's log, and the warm-up of the sampler in vllm/v1/worker/gpu_model_runner.py).
	{text: pattern(`.*(?:(?:CUDA|HIP|XPU) out of memory|OutOfMemoryError: |CUDA error: out of memory|\[CUDA\]: out of memory|` +
		`CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: .*(?:allocat|memory)|Cuda failure \d* ?'out of memory'|hipErrorOutOfMemory).*`),
		start: OOMStart, load: OOMLoad},

	// A GPU kernel failed (torch 2.9 and 2.14, c10/cuda/CUDAException.h). The code line that reports the fault is
	// usually not the one that caused it.
	{text: pattern(`.*(?:an illegal memory access was encountered|device-side assert triggered|unspecified launch failure|Memory access fault by GPU|an illegal instruction was encountered|misaligned address).*`),
		start: StartCrash, load: CrashLoad, cause: IllegalAccess},
	// A GPU kernel could not be compiled (texts of Triton and of the linker, and texts of ninja and nvcc, which build
	// the extensions of FlashInfer and torch).
	{text: pattern(`.*(?:Failed to find C compiler|Could not find nvcc|nvcc: (?:command )?not found|nvcc fatal|Ninja build failed|ninja: build stopped|` +
		`cannot find -lcuda|cannot find -lcudart|fatal error: \S+\.h(?:pp)?: No such file|CUDA_HOME environment variable is not set|No such file or directory: '\S*(?:ninja|nvcc|gcc)'|` +
		`PTXAS error|ptxas fatal|Error building extension).*`), start: StartCrash, load: CrashLoad, cause: Compiler},
	// csrc/custom_all_reduce.cuh and csrc/quickreduce: vLLM's own kernels print this and end their process.
	{text: pattern(`^Failed: (?:Cuda|CUDA|HIP) error .*`), start: StartCrash, load: CrashLoad},
	// torch/csrc/distributed/c10d: processes cannot reach each other. The failure gets no Cause, because the remedy for
	// NCCL does not apply.
	{text: pattern(`.*(?:Gloo connect\w+ failed|DistNetworkError: ).*`), start: Infrastructure, load: Infrastructure},
	// Native code crashed (texts of Python's faulthandler, of torch's signal handler and of C++).
	{text: pattern(`.*Fatal Python error: Bus error.*`), start: Infrastructure, load: Infrastructure, cause: BusError},
	{text: pattern(`.*(?:Fatal Python error: (?:Segmentation fault|Aborted|Illegal instruction|Floating.point exception)|Segfault encountered).*`),
		start: StartCrash, load: CrashLoad, cause: Segfault},
	{text: pattern(`^ +what\(\): +(.*)`), start: StartCrash, load: CrashLoad, cause: Segfault},
	// vllm/v1/executor/multiproc_executor.py: a worker does not answer. vllm/v1/engine/core_client.py: an engine does
	// not start.
	{text: pattern(`.*RPC call to \w+ timed out.*`), start: StartTimeout, load: Hang, cause: NoToken},
	{text: pattern(`.*Timed out waiting for engine.*`), start: StartTimeout},
	// torch/csrc/distributed/c10d/NCCLUtils.hpp and ProcessGroupNCCL.cpp (2.9),
	// vllm/distributed/device_communicators/pynccl_wrapper.py. Usually the machine is at fault (links, drivers,
	// /dev/shm), and not a flag.
	{text: pattern(`.*(?:NCCL error|ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledSystemError|Watchdog caught collective operation timeout).*`),
		start: Infrastructure, load: Infrastructure, cause: NCCL},
}

// memoryOfOthers changes the class of the failure if other processes hold memory of the GPU. An idle GPU of 16 GiB or
// more has over 95 % of its memory free. If that much is free, gpu-memory-utilization is too high.
func memoryOfOthers(e *ExitError, groups []string) {
	if free, total := parseFigure(groups[2]), parseFigure(groups[3]); free < 0.95*total {
		e.Class, e.Cause = Infrastructure, OthersMemory
	}
}

var (
	// exception matches the last line of an exception, which begins with its name, such as "ValueError: text". A name
	// with a module does not have to end in Error, such as "triton.runtime.errors.OutOfResources: text".
	exception = pattern(`^(?:\w+\.)*\w*(?:Error|Exception|Exit)(?:: .*)?$|^(?:\w+\.)*(?:errors?|exceptions?)\.[A-Z]\w*: .+$`)
	// wrapper matches lines that only report the failure of another part. They come from vllm/v1/engine/utils.py,
	// core.py, core_client.py, exceptions.py and vllm/v1/executor/multiproc_executor.py. It also matches the errors of
	// a process whose peer is gone.
	wrapper = pattern(`Engine core initialization failed|Engine process failed to start|WorkerProc initialization failed|EngineCore failed to start|WorkerProc failed|` +
		`EngineCore encountered|EngineDeadError|died unexpectedly|exited unexpectedly|EngineCore hit an exception|WorkerProc hit an exception|` +
		`^(?:RuntimeError: cancelled|(?:\w+\.)*CancelledError|SystemExit|KeyboardInterrupt|BrokenPipeError|EOFError|Connection\w*Error|zmq\.error\.\w+)\b|Executor failed\.`)
	// survived matches an error that a server survives: vllm/usage/usage_lib.py cannot write its usage statistics.
	survived = pattern(`Permission denied: '[^']*\.config(?:/vllm[^']*)?'`)
	// pydanticField matches an error of pydantic about one field that does not name the field.
	pydanticField = pattern(`^(?:Input should be|Extra inputs are|Field required|Unexpected keyword)`)
	// pointer matches lines that only refer to other lines.
	pointer = pattern(`(?i)\bsee (?:the )?(?:stack ?trace|root cause|error|traceback)s?\b.*(?:above|for (?:the )?root cause)|check the stack trace above`)
	// frame matches a line of a traceback by its indentation: a location, a line of code, or the marks below it.
	frame = pattern(`^ {2}File "|^ {4,}\S|^Traceback \(most recent call last\):|^Process \S+:$`)
	// marks matches the lines of a traceback that are not code.
	marks = pattern(`^ {2}File |^\S|^[ ^~]*$`)
	// usageError matches an argparse error of any program, such as "vllm serve: error: argument --x: …".
	usageError = pattern(`^\S.{0,80}?: error: (.+)`)
)

// The engine logs the first text when it has reset the prefix cache, and the second when it could not
// (vllm/v1/core/block_pool.py).
const (
	resetDone   = "Successfully reset prefix cache"
	resetFailed = "Failed to reset prefix cache"
)
