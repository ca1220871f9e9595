package vllm

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"vllmtuner/serverctl/sim"
)

// The words with which vLLM dies. But for names and places, which each version has its own of, they are those of 0.14.1 with torch 2.9.1, huggingface_hub 0.36 and transformers 4.57,
// read in their sources or, where vLLM on a CPU dies of the same, in its log. What a GPU alone can bring about (out of memory,
// an illegal access, NCCL) was taken from logs that users have published, and shortened to the frames that say something.

// packages is where the modules of vLLM's own image are.
const packages = "/usr/local/lib/python3.12/dist-packages"

// deadEngine is what the log is told of a dead engine (vllm/v1/engine/exceptions.py).
const deadEngine = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// toldDead is what clients are told of a dead engine: 0.33.0 tells them less than its log.
func (f *release) toldDead() string {
	if f.version == "0.33.0" {
		return "The server had an error while processing your request."
	}
	return deadEngine
}

// outOfMemory is torch's (c10/cuda/CUDACachingAllocator.cpp).
func outOfMemory(p *sim.Profile, _ sim.Options) string {
	g := p.Memory.GPUGiB
	return fmt.Sprintf("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of "+
		"%.2f GiB of which 412.38 MiB is free. Including non-PyTorch memory, this process has %.2f GiB memory in use. Of the "+
		"allocated memory %.2f GiB is allocated by PyTorch, and 1.26 GiB is reserved by PyTorch but unallocated. If reserved but "+
		"unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "+
		"documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)",
		g, g-0.41, g-2.69)
}

// illegalAccess is torch's (c10/cuda/CUDAException.cpp).
func illegalAccess(*sim.Profile, sim.Options) string {
	return "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n" +
		"Search for `cudaErrorIllegalAddress' in " +
		"https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n" +
		"CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be " +
		"incorrect.\n" +
		"For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n" +
		"Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
}

// ncclFailed is torch's (torch/csrc/distributed/c10d/NCCLUtils.hpp) around one of NCCL's.
func ncclFailed(*sim.Profile, sim.Options) string {
	return "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled " +
		"system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\n" +
		"ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n" +
		"Last error:\n" +
		"socketPollConnect: connect to 127.0.0.1<45311> returned Connection refused, exceeded error retry count (35)"
}

// diskFull and tooManyFiles are Python's.
func diskFull(*sim.Profile, sim.Options) string { return "OSError: [Errno 28] No space left on device" }

func tooManyFiles(*sim.Profile, sim.Options) string { return "OSError: [Errno 24] Too many open files" }

// profilingDisturbed is an assertion of vllm/v1/worker/gpu_worker.py, for free memory in GiB before and after.
func profilingDisturbed(before, after float64) string {
	return fmt.Sprintf("AssertionError: Error in memory profiling. Initial free memory %s GiB, current free memory %s GiB. "+
		"This happens when other processes sharing the same container release GPU memory while vLLM is profiling during "+
		"initialization. To fix this, ensure consistent GPU memory allocation or isolate vLLM in its own container.",
		rounded(before), rounded(after))
}

// disturbed is the same for a GPU of which another process had held a sixteenth.
func disturbed(p *sim.Profile, _ sim.Options) string {
	return profilingDisturbed(p.Memory.GPUGiB*15/16, p.Memory.GPUGiB-0.5)
}

// tooLittleFree is that of vllm/v1/worker/utils.py, request_memory.
func tooLittleFree(free, total, utilization float64) string {
	return fmt.Sprintf("ValueError: Free memory on device cuda:0 (%s/%s GiB) on startup is less than desired GPU memory "+
		"utilization (%s, %s GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
		rounded(free), rounded(total), python(utilization), rounded(total*utilization))
}

// requestID is one of the Hub's.
const requestID = "(Request ID: Root=1-695139c1-20c276683bbfa05022511a7b;379c2def-ca77-4fc6-9489-6fc1f7a44e40)"

// modelNotFound is the Hub's answer (huggingface_hub/utils/_http.py) and what transformers makes of it (utils/hub.py).
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

// gatedModel likewise.
func gatedModel(_ *sim.Profile, o sim.Options) string {
	denied := "401 Client Error. " + requestID + "\n\n" +
		"Cannot access gated repo for url https://huggingface.co/" + o.Source() + "/resolve/main/config.json.\n" +
		"Access to model " + o.Source() + " is restricted. You must have access to it and be authenticated to access it. " +
		"Please log in."
	return "huggingface_hub.errors.GatedRepoError: " + denied + "\n" + caused(
		"OSError: You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/"+
			o.Source()+".\n"+denied)
}

// caused goes from an exception to the one that it was turned into.
func caused(next string) string {
	return "\nThe above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n" +
		"  File \"" + packages + "/transformers/utils/hub.py\", line 543, in cached_files\n    raise OSError(\n" + next
}

// frame is one entry of a traceback.
func frame(file string, line int, function, code string) string {
	return fmt.Sprintf("  File \"%s/%s\", line %d, in %s\n    %s\n", packages, file, line, function, code)
}

const traceback = "Traceback (most recent call last):\n"

// engineFailed writes how an engine ends that does not start (vllm/v1/engine/core.py, run_engine_core): its logger's record,
// then Python's own words of a process that dies of an exception. Seen of 0.14.1 on a CPU.
func (l *logger) engineFailed(exception string) {
	trace := traceback + frame("vllm/v1/engine/core.py", 927, "run_engine_core",
		"engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)") + exception
	l.engineError(l.release.log.engineFailed, "EngineCore failed to start.\n%s", trace)
	l.trace(engineCore, "Process "+l.release.engine+":\n"+trace)
}

// engineFatal writes how an engine ends that was running.
func (l *logger) engineFatal(exception string) {
	trace := traceback +
		frame("vllm/v1/engine/core.py", 929, "run_engine_core", "engine_core.run_busy_loop()") +
		frame("vllm/v1/engine/core.py", 956, "run_busy_loop", "self._process_engine_step()") +
		frame("vllm/v1/engine/core.py", 989, "_process_engine_step", "outputs, model_executed = self.step_fn()") + exception
	l.engineError(l.release.log.dumping, "Dumping input data for V1 LLM engine (v%s) with config: simulated, ", l.release.version)
	l.engineError(l.release.log.engineFatal, "EngineCore encountered a fatal error.\n%s", trace)
	l.trace(engineCore, "Process "+l.release.engine+":\n"+trace)
}

// engineLost writes what the API server makes of a dead engine: one that died without a word is found by its process
// (vllm/v1/engine/core_client.py, monitor_engine_cores), one with words has said so itself.
func (l *logger) engineLost(told bool) {
	switch {
	case told:
	case l.release.modern:
		l.line(apiServer, "WARNING", l.release.log.engineLost, "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
	default:
		l.apiError(l.release.log.engineLost, "Engine core proc %s died unexpectedly, shutting down client.", l.release.engine)
	}
	l.apiError(l.release.log.outputFailed, "AsyncLLM output_handler failed.\n%s", traceback+
		frame("vllm/v1/engine/async_llm.py", 502, "output_handler", "outputs = await engine_core.get_output_async()")+
		frame("vllm/v1/engine/core_client.py", 899, "get_output_async", "raise self._format_exception(outputs) from None")+
		"vllm.v1.engine.exceptions.EngineDeadError: "+deadEngine)
}

// apiFailed writes how an API server ends that does not start.
func (l *logger) apiFailed(exception string) {
	l.trace(apiServer, traceback+"  File \"/usr/local/bin/vllm\", line 10, in <module>\n    sys.exit(main())\n"+exception)
}

// initFailed is the API server's last word when its engine did not start (vllm/v1/engine/utils.py). exit is how the engine
// ended: its exit code, or minus its signal.
func (f *release) initFailed(exit int) string {
	return frame("vllm/v1/engine/utils.py", 980, "wait_for_engine_startup", "raise RuntimeError(") +
		fmt.Sprintf("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'%s': %d}",
			f.engine, exit)
}

// fitted is the text of an engine that cannot start as the version has it: memory.go has those of 0.14.1, whose "models's" was
// mended later.
func (f *release) fitted(text string) string {
	if f.modern {
		return strings.Replace(text, "models's max seq len", "model's max seq len", 1)
	}
	return text
}

// invalid is pydantic's refusal of a combination of flags (seen of 0.14.1).
func invalid(text string) string {
	return "pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig\n" +
		"  Value error, " + text + " [type=value_error, input_value=ArgsKwargs((), {'runner_t..., 'stream_interval': 1}), " +
		"input_type=ArgsKwargs]\n" +
		"    For further information visit https://errors.pydantic.dev/2.12/v/value_error"
}

// rounded writes GiB as vLLM's format_gib does: round(x, 2).
func rounded(gib float64) string { return python(math.Round(gib*100) / 100) }

// python writes a float as Python's str does.
func python(x float64) string {
	text := strconv.FormatFloat(x, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}
