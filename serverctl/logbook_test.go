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

func TestStatusOfAnEnding(t *testing.T) {
	for want, end := range map[int]exitState{
		-9: {code: -1, signal: syscall.SIGKILL}, -6: {code: -1, signal: syscall.SIGABRT}, 3: {code: 3}, 0: {code: -1},
	} {
		if got := end.status(); got != want {
			t.Errorf("status of %+v = %d, want %d", end, got, want)
		}
	}
}

func TestWeightsThatAreStillReadAreTheDisksFault(t *testing.T) {
	var l logbook
	l.begin(time.Now())
	fmt.Fprint(&l, "INFO 11-20 19:48:19 [gpu_model_runner.py:55] Starting to load model /m...\n")
	fmt.Fprint(&l, "Loading safetensors checkpoint shards:   0% Completed | 0/4\rLoading safetensors checkpoint shards:  25% Completed | 1/4")
	if now := l.snapshot(); now.progress() != "loading the weights, 25 %" {
		t.Errorf("the phase is %q", now.progress())
	}
	r := &readiness{server: &Server{log: &l, config: Config{StartTimeout: time.Minute}}, waiting: "/health"}
	if exit := r.timeout(); exit.Class != Infrastructure || exit.Cause != SlowDisk || !strings.Contains(exit.Evidence, "25 % of the weights") {
		t.Errorf("timeout() = %+v", exit)
	}
	fmt.Fprint(&l, "\rLoading safetensors checkpoint shards: 100% Completed | 4/4\n")
	if exit := r.timeout(); exit.Class != StartTimeout {
		t.Errorf("with all weights loaded: %+v", exit)
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
		{"0.25.1 on an H200", read("start-0.25.1.log"),
			Facts{Version: "0.25.1", KVCacheTokens: 933248, KVCacheGiB: 113.92, MaxConcurrency: 56.96, ModelGiB: 13.54, GraphGiB: 0.98, Compiled: true}},
		{"0.33 with its logo turned off", "INFO 11-20 18:31:44 [api_utils.py:347] vLLM server version 0.33.0, serving model /m\n", Facts{Version: "0.33.0"}},
		{"two GPUs: the smaller cache counts", gpu, Facts{KVCacheTokens: 340112, KVCacheGiB: 51.9, MaxConcurrency: 20.76, ModelGiB: 66.5, GraphGiB: 0.83}},
		{"the simulator", "(EngineCore_DP0 pid=3) INFO 11-20 19:48:22 [core.py:97] Initializing a V1 LLM engine (v0.14.1) with config: model='m', simulated profile small\n",
			Facts{Version: "0.14.1", Simulated: true}},
	} {
		var l logbook
		l.Write([]byte(row.text))
		if got := l.snapshot().facts; !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: facts = %+v, want %+v", row.name, got, row.want)
		}
	}
}

func TestTheTailHoldsTheLastLinesWithoutNoise(t *testing.T) {
	var full strings.Builder
	l := &logbook{fullLog: &full}
	for i := range 60 {
		fmt.Fprintf(l, "line %d\n", i)
	}
	fmt.Fprint(l, "INFO:     127.0.0.1:1 - \"GET /health HTTP/1.1\" 200 OK\n\n")
	fmt.Fprint(l, "Loading:  10%\rLoading:  50%\rLoad", "ing: 100%\r\n\x1b[0;36mcoloured\x1b[0m without end")
	l.close()
	tail := l.snapshot().tail
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
	l := &logbook{fullLog: full{}}
	if _, err := l.Write([]byte("INFO 11-20 19:48:06 [api_server.py:1272] vLLM API server version 0.14.1\n")); err != nil {
		t.Fatal(err)
	}
	if f := l.snapshot().facts; f.Version != "0.14.1" {
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
		if e := l.death(exitState{code: 1, words: "exit status 1"}); e.Class == "" || len(e.Tail) > tailLines {
			t.Errorf("death = %+v", e)
		}
	})
}

func TestASignThatWasSurvivedIsNotTheDeath(t *testing.T) {
	const files = "(APIServer pid=1) OSError: [Errno 24] Too many open files\n"
	const memory = "(EngineCore_DP0 pid=2) ERROR 11-20 20:50:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
	for _, row := range []struct {
		name  string
		age   time.Duration // age of the first error line when the other lines come
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
		if e := l.death(exitState{code: 1, words: "exit status 1"}); e.Class != row.class {
			t.Errorf("%s: %v, want %s", row.name, e, row.class)
		}
	}
}

func TestNoPartOfASecretIsSeen(t *testing.T) {
	request := `"GET / HTTP/1.1" 200 ` // the logbook looks for no sign of a death in such a line, which would take seconds
	for _, row := range []struct{ name, line string }{
		{"one secret begins like another", "token abcdefTOPSECRET"},
		{"a line that is cut in the middle of one", request + strings.Repeat("x", maxLine-10-len(request)) + "abcdefTOPSECRET"},
	} {
		var out strings.Builder
		l := &logbook{fullLog: &out, censor: newCensor([]string{"abcdef", "abcdefTOPSECRET"})}
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
		if got := AvailableKVGiB(evidence); got == nil || *got != want {
			t.Errorf("AvailableKVGiB(%q) = %v, want %g", evidence, got, want)
		}
	}
	for _, evidence := range []string{"", "No available memory for the cache blocks", "available KV cache memory (1.2.3 GiB)"} {
		if got := AvailableKVGiB(evidence); got != nil {
			t.Errorf("AvailableKVGiB(%q) = %g, want none", evidence, *got)
		}
	}
}

func TestARefusedStartHasItsFactsAsValues(t *testing.T) {
	for _, row := range []struct {
		name, log string
		class     Class
		argparse  bool
		kv        float64 // 0 if the log does not tell it
	}{
		{"argparse", "vllm serve: error: unrecognized arguments: --x\n", FlagsRejected, true, 0},
		{"pydantic", "  Value error, argument x is too small [type=value_error, input_value=1]\n", FlagsRejected, false, 0},
		{"a small KV cache", "ValueError: To serve at least one request with the models's max seq len (16384), (5.00 GiB KV cache is needed, " +
			"which is larger than the available KV cache memory (1.91 GiB). Based on the available memory\n", KVTooSmall, false, 1.91},
		{"no KV cache", "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`\n", KVTooSmall, false, 0},
	} {
		var l logbook
		l.Write([]byte(row.log))
		e := l.death(exitState{code: 1})
		if e.Class != row.class || e.Argparse != row.argparse || (e.KVGiB != nil) != (row.kv != 0) || e.KVGiB != nil && *e.KVGiB != row.kv {
			t.Errorf("%s: death = %+v, want %+v", row.name, e, row)
		}
	}
}
