package serverctl

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Each class is tested with the text in which it was seen or read. Rows with a file are excerpts of real logs.
func TestDeathsAreRecognised(t *testing.T) {
	const engine = "(EngineCore_DP0 pid=17325) ERROR 11-20 21:23:37 [core.py:936] "
	const wrapped = "\n(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
	for _, row := range []struct {
		name, file, text string
		loaded           bool
		code             int
		class            Class
		evidence         string
	}{
		{"argparse: a bad value", "death-flags-value-0.14.1.log", "", false, 2, FlagsRejected, "argument --max-num-seqs: invalid int value: 'abc'"},
		{"argparse: an unknown flag", "death-flags-unknown-0.14.1.log", "", false, 2, FlagsRejected, "unrecognized arguments: --max-num-sequences 3"},
		{"pydantic: flags in conflict", "death-flags-conflict-0.14.1.log", "", false, 1, FlagsRejected,
			"max_num_batched_tokens (2048) must be greater than or equal to max_num_seqs (4096)."},
		{"pydantic: a length that the model has not", "death-flags-model-len-0.14.1.log", "", false, 1, FlagsRejected, "User-specified max_model_len (999999)"},
		{"a folder that is not there", "death-model-folder-0.14.1.log", "", false, 1, ModelNotFound, "'/nonexistent/model'"},
		{"a model that is not in the cache", "death-model-cache-0.14.1.log", "", false, 1, ModelNotFound, "cached snapshot folder"},
		{"a port that is taken", "death-port-0.14.1.log", "", false, 1, PortTaken, "[Errno 98] Address already in use"},
		{"the root cause, not the wrapper that comes last", "death-kv-0.14.1.log", "", false, 1, KVTooSmall, "To serve at least one request"},
		{"0.33's spelling of a KV cache that is too small", "", "ValueError: To serve at least one request with the model's max seq len (4000000), " +
			"(1.91 GiB KV cache is needed, which is larger than the available KV cache memory (-0.2 GiB).", false, 1, KVTooSmall, "-0.2 GiB"},
		{"no room for any KV cache", "", engine + "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`" + wrapped,
			false, 1, KVTooSmall, "No available memory for the cache blocks"},
		{"out of memory during the start", "", engine + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB." + wrapped, false, 1, OOMStart, "CUDA out of memory"},
		{"out of memory of an older torch", "", "torch.cuda.OutOfMemoryError: CUDA out of memory.", false, 1, OOMStart, "CUDA out of memory"},
		{"out of memory while the sampler warms up", "", engine + "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests." + wrapped,
			false, 1, OOMStart, "warming up sampler"},
		{"a utilization above what is free", "", engine + "ValueError: Free memory on device cuda:0 (138.2/139.8 GiB) on startup is less than desired GPU memory utilization (0.99, 138.4 GiB).",
			false, 1, OOMStart, "(138.2/139.8 GiB)"},
		{"another process on the GPU", "", engine + "ValueError: Free memory on device cuda:0 (20.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.9, 125.8 GiB).",
			false, 1, Infrastructure, "(20.1/139.8 GiB)"},
		{"another process gives memory back", "", "AssertionError: Error in memory profiling. Initial free memory 20 GiB, current free memory 30 GiB.", false, 1, Infrastructure, "Error in memory profiling"},
		{"an unknown exception", "", engine + "KeyError: 'rope_type'" + wrapped, false, 1, StartCrash, "KeyError: 'rope_type'"},
		{"an engine that ended without a word", "", wrapped, false, 1, Infrastructure, "the engine ended during the start without a word"},
		{"nothing but a line that points at others", "", "(APIServer pid=1) ValueError: what is wrong\n(APIServer pid=1) Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.",
			false, 1, StartCrash, "ValueError: what is wrong"},
		{"nothing at all", "", "", false, -1, Infrastructure, "signal: killed"},
		{"a warning that names an error is none", "", "WARNING 11-20 21:24:12 [system_utils.py:262] errors like `OSError: [Errno 98] Address already in use`", false, 1, StartCrash, "errors like"},
		{"out of memory under load", "", engine + "torch.OutOfMemoryError: CUDA out of memory.", true, 0, OOMLoad, "CUDA out of memory"},
		{"an engine that dies of something else", "", "ERROR:    Exception in ASGI application\nValueError: bad request\n" + engine + "EngineCore encountered a fatal error.\n" +
			engine + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", true, 0, CrashLoad, "illegal memory access"},
		{"words of a start say nothing under load", "", "ValueError: No available memory for the cache blocks.", true, 1, CrashLoad, "ValueError"},
	} {
		t.Run(row.name, func(t *testing.T) {
			text := []byte(row.text)
			if row.file != "" {
				var err error
				if text, err = os.ReadFile("testdata/" + row.file); err != nil {
					t.Fatal(err)
				}
			}
			l := &logbook{logState: logState{loaded: row.loaded}}
			l.Write(text)
			l.close()
			if e := l.death(endingWith(row.code)); e.Class != row.class || !strings.Contains(e.Evidence, row.evidence) || e.Code != row.code {
				t.Errorf("death = %s, %q, %d; want %s with %q", e.Class, e.Evidence, e.Code, row.class, row.evidence)
			}
		})
	}
}

func TestCausesSayMoreThanTheClass(t *testing.T) {
	const engine = "(EngineCore_DP0 pid=17325) ERROR 11-20 21:23:37 [core.py:936] "
	for _, row := range []struct {
		name, text string
		loaded     bool
		code       int
		class      Class
		cause      Cause
		fatal      bool
	}{
		{"another process gives memory back", "AssertionError: Error in memory profiling. Initial free memory 20 GiB", false, 1, Infrastructure, Profiling, false},
		{"another process on the GPU", engine + "ValueError: Free memory on device cuda:0 (20.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.9, 125.8 GiB).",
			false, 1, Infrastructure, OthersMemory, false},
		{"a gated model", "huggingface_hub.errors.GatedRepoError: 403 Client Error.\nAccess to model meta/llama is restricted", false, 1, ModelNotFound, GatedModel, true},
		{"a full disk", engine + "OSError: [Errno 28] No space left on device", false, 1, Infrastructure, DiskFull, true},
		{"a full disk under load", engine + "OSError: [Errno 28] No space left on device", true, -1, Infrastructure, DiskFull, true},
		{"no descriptors", "OSError: [Errno 24] Too many open files", true, -1, Infrastructure, TooManyFiles, true},
		{"GPUs that do not reach each other", engine + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error", false, 1, Infrastructure, NCCL, false},
		{"a kernel that reads where it must not", engine + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered", true, 0, CrashLoad, IllegalAccess, false},
		{"an engine that dies", engine + "EngineCore encountered a fatal error.\n" + engine + "KeyError: 3", true, 0, CrashLoad, EngineDead, false},
		{"an end with 0 under load", "INFO:     Shutting down\n", true, 0, Infrastructure, ExitZero, false},
		{"a SIGKILL of which nothing is known", "", true, -1, Infrastructure, Killed, false},
		{"an exit of its own of which nothing is known", "", true, 3, CrashLoad, "", false},
		{"an engine's exception behind an exit with 0", engine + "KeyError: 3", true, 0, CrashLoad, "", false},
		{"a client's error before somebody kills it", "ERROR:    Exception in ASGI application\nValueError: bad request\n", true, -1, Infrastructure, Killed, false},
		{"an engine that fails before somebody asks", engine + "EngineCore encountered a fatal error.\n" + engine + "KeyError: 3\nINFO 11-20 21:23:38 [launcher.py:110] Shutting down FastAPI HTTP server.\n",
			true, 0, CrashLoad, EngineDead, false},
		{"NCCL's word for a lack of memory", "ValueError: NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'", false, 1, OOMStart, "", false},
		{"an API server that fails ends its engine", "(EngineCore pid=2) INFO 11-20 21:23:37 [core.py:1455] [shutdown] EngineCore: trigger received signal=SIGTERM\n(APIServer pid=1) ValueError: no such template",
			false, 1, StartCrash, "", false},
		{"an engine that is asked to end", "(EngineCore pid=2) INFO 11-20 21:23:37 [core.py:1455] [shutdown] EngineCore: trigger received signal=SIGTERM\n", true, 0, Infrastructure, Terminated, false},
		{"statistics that cannot be written harm nobody", "(EngineCore pid=84) PermissionError: [Errno 13] Permission denied: '/.config'\n(EngineCore pid=84) KeyError: 3\n", false, 1, StartCrash, "", false},
		{"a hub that refused, and a model that was there", "ERROR 11-20 21:23:37 [config.py:1] Error retrieving file list: 401 Client Error, retrying 1 of 2\n" +
			engine + "ValueError: No available memory for the cache blocks.\n", false, 1, KVTooSmall, "", false},
		{"a shell's word of a server that crashed", "", true, 139, CrashLoad, Segfault, false},
		{"a model that is not there", "OSError: /m does not appear to have a file named config.json", false, 1, ModelNotFound, "", true},
		{"an engine in Dynamo's layout of the log", "2025-11-20T19:48:19.123456Z ERROR core.run_engine_core: torch.OutOfMemoryError: CUDA out of memory.", false, 1, OOMStart, "", false},
	} {
		l := &logbook{logState: logState{loaded: row.loaded}}
		l.Write([]byte(row.text))
		l.close()
		if e := l.death(endingWith(row.code)); e.Class != row.class || e.Cause != row.cause || e.Fatal() != row.fatal {
			t.Errorf("%s: %s (%s), fatal %v; want %s (%s), fatal %v: %q", row.name, e.Class, e.Cause, e.Fatal(), row.class, row.cause, row.fatal, e.Evidence)
		}
	}
}

// endingWith returns the ending of a process with that exit code; a negative one means that it was killed.
func endingWith(code int) ending {
	if code < 0 {
		return ending{code, syscall.SIGKILL, "signal: killed"}
	}
	return ending{code: code, words: fmt.Sprintf("exit status %d", code)}
}

func TestWeightsThatAreStillReadAreTheDisksFault(t *testing.T) {
	var l logbook
	l.begin(time.Now())
	fmt.Fprint(&l, "INFO 11-20 19:48:19 [gpu_model_runner.py:55] Starting to load model /m...\n")
	fmt.Fprint(&l, "Loading safetensors checkpoint shards:   0% Completed | 0/4\rLoading safetensors checkpoint shards:  25% Completed | 1/4")
	if now := l.now(); now.progress() != "loading the weights, 25 %" {
		t.Errorf("the phase is %q", now.progress())
	}
	s := &Server{log: &l, config: Config{StartTimeout: time.Minute}}
	if exit := s.startTimeout("/health"); exit.Class != Infrastructure || exit.Cause != SlowDisk || !strings.Contains(exit.Evidence, "25 % of the weights") {
		t.Errorf("startTimeout = %+v", exit)
	}
	fmt.Fprint(&l, "\rLoading safetensors checkpoint shards: 100% Completed | 4/4\n")
	if exit := s.startTimeout("/health"); exit.Class != StartTimeout {
		t.Errorf("with all weights loaded: %+v", exit)
	}
}

func TestAKVCacheThatIsTooSmallSaysByHowMuch(t *testing.T) {
	text, err := os.ReadFile("testdata/death-kv-0.14.1.log")
	if err != nil {
		t.Fatal(err)
	}
	var l logbook
	l.Write(text)
	if e := l.death(ending{code: 1}); e.KVNeededGiB != 1.91 || e.KVAvailableGiB != 1 || e.KVMaxModelLen != 2097152 {
		t.Errorf("needed %v, available %v, room for %d tokens, want 1.91, 1 and 2097152", e.KVNeededGiB, e.KVAvailableGiB, e.KVMaxModelLen)
	}
}

func TestFactsOfBothLayouts(t *testing.T) {
	read := func(file string) string {
		text, err := os.ReadFile("testdata/" + file)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	const gpu = `(Worker_TP0 pid=1) INFO 11-20 19:48:22 [gpu_model_runner.py:3905] Model loading took 66.50 GiB memory and 30.1 seconds
(Worker_TP0 pid=1) INFO 11-20 19:48:22 [gpu_worker.py:358] Available KV cache memory: 52.10 GiB
(Worker_TP1 pid=2) INFO 11-20 19:48:22 [gpu_worker.py:358] Available KV cache memory: 51.90 GiB
(EngineCore pid=3) INFO 11-20 19:48:22 [kv_cache_utils.py:1305] GPU KV cache size: 340,112 tokens, Maximum concurrency for 16,384 tokens per request: 20.76x
(Worker_TP0 pid=1) INFO 11-20 19:48:22 [gpu_model_runner.py:4856] Graph capturing finished in 12 secs, took 0.83 GiB
`
	for _, row := range []struct {
		name, text string
		want       Facts
	}{
		{"0.14.1 on a CPU, two lines", read("start-0.14.1.log"), Facts{Version: "0.14.1", KVCacheTokens: 2097152, MaxConcurrency: 1024}},
		{"0.32.0 on a CPU, one line", read("start-0.32.0.log"), Facts{Version: "0.32.0", KVCacheTokens: 2097152, MaxConcurrency: 1024}},
		{"0.33 with its logo turned off", "INFO 11-20 18:31:44 [api_utils.py:347] vLLM server version 0.33.0, serving model /m\n", Facts{Version: "0.33.0"}},
		{"two GPUs: the smaller cache counts", gpu, Facts{KVCacheTokens: 340112, KVCacheGiB: 51.9, MaxConcurrency: 20.76, ModelGiB: 66.5, GraphGiB: 0.83}},
		{"the simulator", "(EngineCore_DP0 pid=3) INFO 11-20 19:48:22 [core.py:97] Initializing a V1 LLM engine (v0.14.1) with config: model='m', simulated profile small\n",
			Facts{Version: "0.14.1", Simulated: true}},
	} {
		var l logbook
		l.Write([]byte(row.text))
		if got := l.now().facts; !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: facts = %+v, want %+v", row.name, got, row.want)
		}
	}
}

func TestTheTailHoldsTheLastLinesWithoutNoise(t *testing.T) {
	var full strings.Builder
	l := &logbook{to: &full}
	for i := range 60 {
		fmt.Fprintf(l, "line %d\n", i)
	}
	fmt.Fprint(l, "INFO:     127.0.0.1:1 - \"GET /health HTTP/1.1\" 200 OK\n\n")
	fmt.Fprint(l, "Loading:  10%\rLoading:  50%\rLoad", "ing: 100%\r\n\x1b[0;36mcoloured\x1b[0m without end")
	l.close()
	tail := l.now().tail
	if len(tail) != 50 || !slices.Equal(tail[47:], []string{"line 59", "Loading: 100%", "coloured without end"}) {
		t.Errorf("tail = %q", tail)
	}
	if !strings.Contains(full.String(), "/health") || !strings.HasPrefix(full.String(), "line 0\n") {
		t.Error("the full log is not full")
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

func TestALogThatCannotBeWrittenDoesNotStopTheReading(t *testing.T) {
	l := &logbook{to: full{}}
	if _, err := l.Write([]byte("INFO 11-20 19:48:06 [api_server.py:1272] vLLM API server version 0.14.1\n")); err != nil {
		t.Fatal(err)
	}
	if f := l.now().facts; f.Version != "0.14.1" {
		t.Errorf("facts = %+v", f)
	}
	if err := l.close(); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("close() = %v", err)
	}
}

func FuzzLogbook(f *testing.F) {
	f.Add([]byte("(EngineCore_DP0 pid=1) ERROR 11-20 21:23:37 [core.py:936] ValueError: x\r\n"), 7)
	f.Add([]byte("\r\r\n\x1b[0;36m"), 1)
	f.Fuzz(func(t *testing.T, text []byte, piece int) {
		var l logbook
		for chunk := range slices.Chunk(text, max(1, piece)) {
			if n, err := l.Write(chunk); n != len(chunk) || err != nil {
				t.Fatalf("Write = %d, %v", n, err)
			}
		}
		l.close()
		if e := l.death(ending{code: 1, words: "exit status 1"}); e.Class == "" || len(e.Tail) > tailLines {
			t.Errorf("death = %+v", e)
		}
	})
}

func TestASignThatWasSurvivedIsNotTheDeath(t *testing.T) {
	const files = "(APIServer pid=1) OSError: [Errno 24] Too many open files\n"
	const memory = "(EngineCore_DP0 pid=2) ERROR 11-20 20:50:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
	for _, row := range []struct {
		name  string
		age   time.Duration // age of the first sign when the other lines come
		rest  string
		class Class
	}{
		{"what the machine lacked does not hide what the point needs", 0, memory, OOMLoad},
		{"an old sign says nothing", 2 * staleSign, "", CrashLoad},
		{"a fresh one does", 0, "", Infrastructure},
	} {
		l := &logbook{logState: logState{loaded: true}}
		l.Write([]byte(files))
		l.signs.at = l.signs.at.Add(-row.age)
		l.Write([]byte(row.rest))
		if e := l.death(ending{code: 1, words: "exit status 1"}); e.Class != row.class {
			t.Errorf("%s: %v, want %s", row.name, e, row.class)
		}
	}
}

func TestNoPartOfASecretIsSeen(t *testing.T) {
	for _, row := range []struct{ name, line string }{
		{"one secret begins like another", "token abcdefTOPSECRET"},
		{"a line that is cut in the middle of one", strings.Repeat("x", maxLine-10) + "abcdefTOPSECRET"},
	} {
		var out strings.Builder
		l := &logbook{to: &out, secrets: newSecrets([]string{"abcdef", "abcdefTOPSECRET"})}
		fmt.Fprintln(l, row.line)
		if strings.Contains(out.String(), "TOP") || strings.Contains(out.String(), "abcd") {
			t.Errorf("%s: …%s", row.name, out.String()[max(0, out.Len()-40):])
		}
	}
}

func TestAvailableKVGiB(t *testing.T) {
	for evidence, want := range map[string]float64{
		"(1.91 GiB KV cache is needed, which is larger than the available KV cache memory (-0.2 GiB).": -0.2,
		"which is larger than the available KV cache memory (12.53 GiB). Based on":                     12.53,
	} {
		if got, ok := AvailableKVGiB(evidence); !ok || got != want {
			t.Errorf("AvailableKVGiB(%q) = %g, %v; want %g", evidence, got, ok, want)
		}
	}
	for _, evidence := range []string{"", "No available memory for the cache blocks", "available KV cache memory (1.2.3 GiB)"} {
		if got, ok := AvailableKVGiB(evidence); ok {
			t.Errorf("AvailableKVGiB(%q) = %g, want none", evidence, got)
		}
	}
}
