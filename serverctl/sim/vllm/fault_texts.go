package vllm

import (
	"embed"
	"fmt"
	"math"
	"os"
	"strings"

	"vllmtuner/serverctl/sim"
)

// deathFiles are the exceptions that vLLM logs when it dies. The rules of the package serverctl read these texts. In a
// text $name stands for a value that deathText fills in. All versions get the texts of 0.14.1 with torch 2.9.1,
// huggingface_hub 0.36 and transformers 4.57. The texts come from vLLM's sources, or from vLLM's log on a CPU. Texts
// that only a GPU produces (out-of-memory, illegal-access, nccl) come from logs that users have published. Tracebacks
// are shortened.
//
//go:embed deaths/*.txt
var deathFiles embed.FS

// deathText returns the text of the named exception. It replaces each $name in that text with its value from parts.
func deathText(name string, parts fields) string {
	text, err := deathFiles.ReadFile("deaths/" + name + ".txt")
	if err != nil {
		panic("vllm: an exception without text: " + err.Error()) // tests raise all exceptions
	}
	return os.Expand(strings.TrimSuffix(string(text), "\n"), func(part string) string { return parts[part] })
}

// deathOf returns the exception of a fault.
func deathOf(f Fault, p *sim.Profile, o sim.Options) string {
	g := p.Memory.GPUGiB
	gib := func(x float64) string { return fmt.Sprintf("%.2f", x) }
	return deathText(f.kind.exception, fields{
		"model": o.Source(), "total": gib(g), "used": gib(g - 0.41), "allocated": gib(g - 2.69),
		"before": roundGiB(g * 15 / 16), "after": roundGiB(g - 0.5), // another process frees a sixteenth of the memory
	})
}

// deadEngine is the message about a dead engine, in the log and to clients (vllm/v1/engine/exceptions.py).
const deadEngine = "EngineCore encountered an issue. See stack trace (above) for the root cause."

// frame returns one entry of a traceback.
func frame(file string, line int, function, code string) string {
	const packages = "/usr/local/lib/python3.12/dist-packages" // the path in vLLM's container image
	return fmt.Sprintf("  File \"%s/%s\", line %d, in %s\n    %s\n", packages, file, line, function, code)
}

const traceback = "Traceback (most recent call last):\n"

// engineFailed logs the end of an engine that does not start (run_engine_core in vllm/v1/engine/core.py). Like 0.14.1
// on a CPU, it logs the logger's record first, and then Python's traceback.
func (l *logger) engineFailed(exception string) {
	trace := traceback + frame("vllm/v1/engine/core.py", 927, "run_engine_core",
		"engine_core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)") + exception
	l.engineError("EngineCore failed to start.\n%s", trace)
	l.trace(engineCore, "Process "+l.release.engine+":\n"+trace)
}

// engineFatal logs the end of a running engine.
func (l *logger) engineFatal(exception string) {
	trace := traceback +
		frame("vllm/v1/engine/core.py", 989, "_process_engine_step", "outputs, model_executed = self.step_fn()") + exception
	l.engineError("EngineCore encountered a fatal error.\n%s", trace)
	l.trace(engineCore, "Process "+l.release.engine+":\n"+trace)
}

// engineLost logs that the API server has lost its engine. The parameter logged says whether the engine logged why it
// died. If the engine did not, the API server logs that the engine's process has ended (monitor_engine_cores in
// vllm/v1/engine/core_client.py).
func (l *logger) engineLost(logged bool) {
	switch {
	case logged:
	case l.release.since032:
		l.record(apiServer, "WARNING", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
	default:
		l.apiError("Engine core proc %s died unexpectedly, shutting down client.", l.release.engine)
	}
	l.apiError("AsyncLLM output_handler failed.\n%s", traceback+
		frame("vllm/v1/engine/core_client.py", 899, "get_output_async", "raise self._format_exception(outputs) from None")+
		"vllm.v1.engine.exceptions.EngineDeadError: "+deadEngine)
}

// apiFailed logs the end of an API server that does not start.
func (l *logger) apiFailed(exception string) {
	l.trace(apiServer, traceback+"  File \"/usr/local/bin/vllm\", line 10, in <module>\n    sys.exit(main())\n"+exception)
}

// initFailed returns the API server's exception when its engine did not start (vllm/v1/engine/utils.py). The parameter
// exit is the engine's exit code, or the negative number of the signal that ended it.
func (f *release) initFailed(exit int) string {
	return frame("vllm/v1/engine/utils.py", 980, "wait_for_engine_startup", "raise RuntimeError(") +
		fmt.Sprintf("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'%s': %d}",
			f.engine, exit)
}

// roundGiB writes GiB as vLLM's format_gib does: round(x, 2).
func roundGiB(gib float64) string { return pythonRepr(math.Round(gib*100) / 100) }
