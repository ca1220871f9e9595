package serverctl

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/proc"
)

// roleVariable is an environment variable that makes the test binary act as vLLM instead of running the tests.
const roleVariable = "SERVERCTL_TEST_ROLE"

func TestMain(m *testing.M) {
	proc.Main()
	if role := os.Getenv(roleVariable); role != "" {
		os.Exit(play(role))
	}
	os.Exit(m.Run())
}

// noExitPause keeps the race detector from sleeping for a second at the end of a child.
const noExitPause = "atexit_sleep_ms=0"

// lifetime is how long a fake server lives at most, so that a failing test leaves nothing behind for long.
const lifetime = 2 * time.Minute

// play imitates all that this package sees of vLLM: a child process with its log lines, endpoints and ways to die.
func play(role string) int {
	role, arg, _ := strings.Cut(role, " ")
	switch role {
	case "log": // prints a log and ends, like a failed start
		name, code, _ := strings.Cut(arg, " ")
		text, err := os.ReadFile(name)
		if err != nil {
			fmt.Println(err)
			return 99
		}
		os.Stdout.Write(text)
		n := 0
		fmt.Sscan(code, &n)
		return n
	case "hang":
		fmt.Println("INFO 11-20 19:48:19 [gpu_model_runner.py:55] Starting to load model /models/tiny...")
		time.Sleep(lifetime)
		return 0
	case "fork": // an engine in its own session that survives SIGTERM
		signal.Ignore(syscall.SIGTERM)
		time.Sleep(lifetime)
		return 0
	case "help":
		fmt.Println(os.Args[1:])
		text, err := os.ReadFile(arg)
		if err != nil {
			fmt.Println(err)
			return 99
		}
		os.Stdout.Write(text)
		return 0
	}
	f := &fake{role: role, arg: arg, stop: make(chan int, 8)}
	return f.serve()
}

// A fake acts as a vLLM server that is ready.
type fake struct {
	role, arg string
	stop      chan int
	requests  atomic.Int64
	dead      atomic.Bool
}

func (f *fake) serve() int {
	port := os.Args[slices.Index(os.Args, "--port")+1]
	listener, err := net.Listen("tcp", "127.0.0.1:"+port)
	if err != nil || f.role == "port" && !f.retried() {
		fmt.Println("(APIServer pid=1) OSError: [Errno 98] Address already in use")
		return 1
	}
	text, err := os.ReadFile("testdata/start-0.14.1.log")
	if err != nil {
		fmt.Println(err)
		return 99
	}
	os.Stdout.Write(text)
	if f.role == "stubborn" {
		if err := f.bearEngine(); err != nil {
			fmt.Println(err)
			return 99
		}
		signal.Ignore(syscall.SIGTERM)
	} else {
		term := make(chan os.Signal, 1)
		signal.Notify(term, syscall.SIGTERM)
		go func() { <-term; f.stop <- 0 }()
	}
	fmt.Printf("(APIServer pid=1) INFO 11-20 19:48:19 [utils.py:263] command line: %v\n", os.Args[1:])
	go http.Serve(listener, f.handler())
	select {
	case code := <-f.stop:
		return code
	case <-time.After(lifetime):
		return 99
	}
}

// retried reports whether the server has been started before. The first start leaves a file, f.arg, as a mark.
func (f *fake) retried() bool {
	_, err := os.Stat(f.arg)
	return err == nil || os.WriteFile(f.arg, nil, 0o600) != nil
}

func (f *fake) bearEngine() error {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleVariable+"=fork")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	return os.WriteFile(f.arg, fmt.Append(nil, cmd.Process.Pid), 0o600)
}

func (f *fake) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		switch {
		case f.dead.Load() && (f.role == "dead-engine" || f.role == "dead-at-first"):
			w.WriteHeader(http.StatusServiceUnavailable)
		case f.dead.Load() && (f.role == "deaf" || f.role == "asked"):
			time.Sleep(lifetime)
		}
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, r *http.Request) {
		if f.role == "key" && r.Header.Get("Authorization") != "Bearer "+os.Getenv("VLLM_API_KEY") {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprint(w, `{"object":"list","data":[{"id":"tiny","max_model_len":2048}]}`)
	})
	mux.HandleFunc("POST /v1/completions", f.completion)
	mux.HandleFunc("GET /metrics", f.metrics)
	mux.HandleFunc("GET /requests", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, f.requests.Load()) })
	if os.Getenv("VLLM_SERVER_DEV_MODE") == "1" {
		mux.HandleFunc("POST /reset_prefix_cache", f.reset)
	}
	return mux
}

// completion answers requests. The start of the server sends the first request. A faulty fake fails at the second
// request, which a test sends. A fake with the role dead-at-first fails at the first.
func (f *fake) completion(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Model  string `json:"model"`
		Prompt string `json:"prompt"`
	}
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil || body.Model != "tiny" {
		http.Error(w, "no such model", http.StatusNotFound)
		return
	}
	n := f.requests.Add(1)
	if f.role == "dead-at-first" {
		f.dead.Store(true)
		http.Error(w, "EngineDeadError", http.StatusInternalServerError)
		return
	}
	if n > 1 && f.role == "frozen" {
		<-r.Context().Done()
		return
	}
	fmt.Fprint(w, `{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}`)
	if n < 2 {
		return
	}
	f.dead.Store(true)
	switch f.role {
	case "crash":
		text, _ := os.ReadFile(f.arg)
		os.Stdout.Write(text)
		f.stop <- 0
	case "asked": // another process asked the server to end; the server waits for its clients, as vLLM 0.14.1 does
		fmt.Println("(APIServer pid=1) INFO 11-20 19:50:00 [launcher.py:110] Shutting down FastAPI HTTP server.")
	case "dead-engine":
		fmt.Println("(APIServer pid=1) ERROR 11-20 19:50:00 [async_llm.py:500] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
	}
}

func (f *fake) metrics(w http.ResponseWriter, _ *http.Request) {
	running, usage := 0.0, 0.0
	if f.role == "busy" {
		running, usage = 3, 0.5
	}
	fmt.Fprintf(w, "vllm:num_requests_running{engine=\"0\"} %g\nvllm:num_requests_waiting{engine=\"0\"} 0\n"+
		"vllm:kv_cache_usage_perc{engine=\"0\"} %g\n"+
		"vllm:cache_config_info{block_size=\"16\",cache_dtype=\"auto\",engine=\"0\",num_gpu_blocks=\"131072\"} 1.0\n", running, usage)
}

// reset answers a reset of the prefix cache. In the roles reset-… two resets fail and the third succeeds, as if blocks
// were freed a moment late.
func (f *fake) reset(w http.ResponseWriter, _ *http.Request) {
	n := f.requests.Add(1) // request 1 was the completion that the start sends
	lost := n <= 3 || f.arg == "never"
	switch f.role {
	case "reset-new":
		fmt.Fprintf(w, `{"success":%v}`, !lost)
	case "reset-silent": // as vLLM 0.14.1 answers with a log level that hides the line
	default:
		if lost {
			fmt.Println("(EngineCore_DP0 pid=2) WARNING 11-20 19:50:00 [block_pool.py:438] Failed to reset prefix cache because some blocks (3) are not freed yet")
		} else {
			fmt.Println("(EngineCore_DP0 pid=2) INFO 11-20 19:50:00 [block_pool.py:451] Successfully reset prefix cache")
		}
	}
}
