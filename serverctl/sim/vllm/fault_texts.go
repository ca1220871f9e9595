package vllm

import (
	"fmt"
	"math"
	"strings"

	"vllmtuner/serverctl/sim"
)

// vLLM logs these texts when it dies, and serverctl's rules read them. All versions get the texts of 0.14.1 with torch
// 2.9.1, huggingface_hub 0.36 and transformers 4.57. They come from the sources, or from vLLM's log on a CPU. Texts
// that only a GPU produces (out of memory, illegal accesses, NCCL) come from logs that users have published. Tracebacks
// are shortened.

// packages is the directory of the Python packages in vLLM's image.
const packages = "/usr/local/lib/python3.12/dist-packages"

// deadEngine is the log's message about a dead engine (vllm/v1/engine/exceptions.py).
const deadEngine = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// deadEngineMessage is the message to clients when the engine is dead. 0.33.0 says less to clients than in its log.
func (f *release) deadEngineMessage() string {
	if f.version == "0.33.0" {
		return "The server had an error while processing your request."
	}
	return deadEngine
}

// outOfMemory returns torch's exception (c10/cuda/CUDACachingAllocator.cpp).
func outOfMemory(p *sim.Profile, _ sim.Options) string {
	g := p.Memory.GPUGiB
	return fmt.Sprintf("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of "+
		"%.2f GiB of which 412.38 MiB is free. Including non-PyTorch memory, this process has %.2f GiB memory in use. Of the "+
		"allocated memory %.2f GiB is allocated by PyTorch, and 1.26 GiB is reserved by PyTorch but unallocated. If reserved but "+
		"unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "+
		"documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)",
		g, g-0.41, g-2.69)
}

// illegalAccess returns torch's exception (c10/cuda/CUDAException.cpp).
func illegalAccess(*sim.Profile, sim.Options) string {
	return "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n" +
		"Search for `cudaErrorIllegalAddress' in " +
		"https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n" +
		"CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be " +
		"incorrect.\n" +
		"For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n" +
		"Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
}

// ncclFailed returns torch's exception for an error of NCCL (torch/csrc/distributed/c10d/NCCLUtils.hpp).
func ncclFailed(*sim.Profile, sim.Options) string {
	return "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled " +
		"system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n" +
		"ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n" +
		"Last error:\n" +
		"socketPollConnect: connect to 127.0.0.1<45311> returned Connection refused, exceeded error retry count (35)"
}

// diskFull and tooManyFiles return Python's exceptions.
func diskFull(*sim.Profile, sim.Options) string { return "OSError: [Errno 28] No space left on device" }

func tooManyFiles(*sim.Profile, sim.Options) string { return "OSError: [Errno 24] Too many open files" }

// profilingDisturbed returns the failed assertion of vllm/v1/worker/gpu_worker.py, for the free memory in GiB before
// and after.
func profilingDisturbed(before, after float64) string {
	return fmt.Sprintf("AssertionError: Error in memory profiling. Initial free memory %s GiB, current free memory %s GiB. "+
		"This happens when other processes sharing the same container release GPU memory while vLLM is profiling during "+
		"initialization. To fix this, ensure consistent GPU memory allocation or isolate vLLM in its own container.",
		roundGiB(before), roundGiB(after))
}

// disturbed returns the assertion for another process that frees a sixteenth of the GPU's memory.
func disturbed(p *sim.Profile, _ sim.Options) string {
	return profilingDisturbed(p.Memory.GPUGiB*15/16, p.Memory.GPUGiB-0.5)
}

// tooLittleFree returns the exception of request_memory in vllm/v1/worker/utils.py.
func tooLittleFree(free, total, utilization float64) string {
	return fmt.Sprintf("ValueError: Free memory on device cuda:0 (%s/%s GiB) on startup is less than desired GPU memory "+
		"utilization (%s, %s GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
		roundGiB(free), roundGiB(total), pythonRepr(utilization), roundGiB(total*utilization))
}

// requestID is a request ID of Hugging Face.
const requestID = "(Request ID: Root=1-695139c1-20c276683bbfa05022511a7b;379c2def-ca77-4fc6-9489-6fc1f7a44e40)"

// modelNotFound returns the exceptions of huggingface_hub (utils/_http.py) and of transformers (utils/hub.py) for an
// unknown model.
func modelNotFound(_ *sim.Profile, o sim.Options) string {
	return "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. " + requestID + "\n\n" +
		"Repository Not Found for url: https://huggingface.co/" + o.Source() + "/resolve/main/config.json.\n" +
		"Please make sure you specified the correct `repo_id` and `repo_type`.\n" +
		"If you are trying to access a private or gated repo, make sure you are authenticated. For more details, see " +
		"https://huggingface.co/docs/huggingface_hub/authentication\n" + caused(
		"OSError: "+o.Source()+" is not a local folder and is not a valid model identifier listed on "+
			"'https://huggingface.co/models'\nIf this is a private repository, make sure to pass a token having permission to this repo either by logging in with "+
			"`hf auth login` or by passing `token=<your_token>`")
}

// gatedModel returns the exceptions of the same two libraries for a gated model.
func gatedModel(_ *sim.Profile, o sim.Options) string {
	denied := "401 Client Error. " + requestID + "\n\n" +
		"Cannot access gated repo for url https://huggingface.co/" + o.Source() + "/resolve/main/config.json.\n" +
		"Access to model " + o.Source() + " is restricted. You must have access to it and be authenticated to access it. " +
		"Please log in."
	return "huggingface_hub.errors.GatedRepoError: " + denied + "\n" + caused(
		"OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/"+
			o.Source()+".\n"+denied)
}

// caused returns an exception of transformers that the exception before it caused.
func caused(next string) string {
	return "\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n" +
		"  File \"" + packages + "/transformers/utils/hub.py\", line 543, in cached_files\n    raise OSError(\n" + next
}

// frame returns one entry of a traceback.
func frame(file string, line int, function, code string) string {
	return fmt.Sprintf("  File \"%s/%s\", line %d, in %s\n    %s\n", packages, file, line, function, code)
}

const traceback = "Traceback (most recent call last):\n"

// engineFailed logs the end of an engine that does not start (run_engine_core in vllm/v1/engine/core.py): first its
// logger's record, then Python's traceback, as 0.14.1 does on a CPU.
func (l *logger) engineFailed(exception string) {
	trace := traceback + frame("vllm/v1/engine/core.py", 927, "run_engine_core",
		"engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)") + exception
	l.engineError("EngineCore failed to start.\n%s", trace)
	l.trace(engineCore, "Process "+l.release.engine+":\n"+trace)
}

// engineFatal logs the end of a running engine.
func (l *logger) engineFatal(exception string) {
	trace := traceback +
		frame("vllm/v1/engine/core.py", 929, "run_engine_core", "engine_core.run_busy_loop()") +
		frame("vllm/v1/engine/core.py", 956, "run_busy_loop", "self._process_engine_step()") +
		frame("vllm/v1/engine/core.py", 989, "_process_engine_step", "outputs, model_executed = self.step_fn()") + exception
	l.engineError("Dumping input data for V1 LLM engine (v%s) with config: simulated, ", l.release.version)
	l.engineError("EngineCore encountered a fatal error.\n%s", trace)
	l.trace(engineCore, "Process "+l.release.engine+":\n"+trace)
}

// engineLost logs that the API server has lost its engine. An engine that died without a log line is noticed by the end
// of its process (monitor_engine_cores in vllm/v1/engine/core_client.py).
func (l *logger) engineLost(logged bool) {
	switch {
	case logged:
	case l.release.since032:
		l.line(apiServer, "WARNING", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
	default:
		l.apiError("Engine core proc %s died unexpectedly, shutting down client.", l.release.engine)
	}
	l.apiError("AsyncLLM output_handler failed.\n%s", traceback+
		frame("vllm/v1/engine/async_llm.py", 502, "output_handler", "outputs = await engine_core.get_output_async()")+
		frame("vllm/v1/engine/core_client.py", 899, "get_output_async", "raise self._format_exception(outputs) from None")+
		"vllm.v1.engine.exceptions.EngineDeadError: "+deadEngine)
}

// apiFailed logs the end of an API server that does not start.
func (l *logger) apiFailed(exception string) {
	l.trace(apiServer, traceback+"  File \"/usr/local/bin/vllm\", line 10, in <module>\n    sys.exit(main())\n"+exception)
}

// initFailed returns the API server's exception when its engine did not start (vllm/v1/engine/utils.py). exit is the
// engine's exit code, or minus its signal.
func (f *release) initFailed(exit int) string {
	return frame("vllm/v1/engine/utils.py", 980, "wait_for_engine_startup", "raise RuntimeError(") +
		fmt.Sprintf("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'%s': %d}",
			f.engine, exit)
}

// adapt returns the text of a failed start in the words of the version. Package sim has the texts of 0.14.1; later
// versions corrected "models's".
func (f *release) adapt(text string) string {
	if f.since032 {
		return strings.Replace(text, "models's max seq len", "model's max seq len", 1)
	}
	return text
}

// invalid returns pydantic's refusal of a combination of flags (0.14.1). serverctl reads the second line.
func invalid(text string) string {
	return "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n" +
		"  Value error, " + text + " [type=value_error, input_value=ArgsKwargs((), {'runner_t..., 'stream_interval': 1}), " +
		"input_type=ArgsKwargs]\n" +
		"    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
}

// roundGiB writes GiB as vLLM's format_gib does: round(x, 2).
func roundGiB(gib float64) string { return pythonRepr(math.Round(gib*100) / 100) }
