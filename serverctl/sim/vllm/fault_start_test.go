package vllm

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A server that does not start logs the texts of vLLM 0.14.1 in their order, and exits with vLLM's code.
func TestServersThatDoNotStart(t *testing.T) {
	t.Parallel()
	engineFailed := func(exception string) []string {
		return []string{
			"ERROR", "EngineCore failed to start.\n", "Traceback (most recent call last):", exception,
			") Process EngineCore_DP0:\n", exception,
			"(APIServer pid=", "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}\n",
		}
	}
	for _, row := range []struct {
		name  string
		flags string
		code  int
		want  []string // texts that the log must have, in this order
	}{
		{"out of memory", "--sim-fault oom-start", 1, engineFailed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 896.00 MiB. GPU 0 has a total capacity of 16.00 GiB")},
		{"an engine that is killed", "--sim-fault die-loading", 1, []string{"Starting to load model", "Failed core proc(s): {'EngineCore_DP0': -9}\n"}},
		{"another process frees memory", "--sim-fault die-profiling", 1,
			engineFailed("AssertionError: Error in memory profiling. Initial free memory 15.0 GiB, current free memory 15.5 GiB. This happens when other processes sharing the same container release GPU memory")},
		{"a full disk", "--sim-fault disk-full", 1, engineFailed("OSError: [Errno 28] No space left on device\n")},
		{"too many open files", "--sim-fault too-many-files", 1, engineFailed("OSError: [Errno 24] Too many open files\n")},
		{"an error of NCCL", "--sim-fault nccl", 1, engineFailed("torch.distributed.DistBackendError: NCCL error in: ")},
		{"a cache that holds no request, without any fault", "--max-model-len 1000000", 1, engineFailed("ValueError: To serve at least one request with the models's max seq len (1000000)")},
		{"an unknown model", "--sim-fault model-not-found", 1, []string{
			"(APIServer pid=", "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.", "Repository Not Found for url: https://huggingface.co/my/model/resolve/main/config.json.",
			"OSError: my/model is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'"}},
		{"a gated model", "--sim-fault gated-model", 1, []string{
			"huggingface_hub.errors.GatedRepoError: 401 Client Error.", "Access to model my/model is restricted.",
			"OSError: You are trying to access a gated repo.", "Make sure to have access to it at https://huggingface.co/my/model."}},
		{"flags that exclude each other, without any fault", "--max-num-seqs 4096", 1, []string{
			"pydantic_core._pydantic_core.ValidationError: 1 validation error for SchedulerConfig", "  Value error, max_num_batched_tokens (2048) must be greater than or equal to max_num_seqs (4096). [type=value_error, input_value="}},
		{"an unknown flag, without any fault", "--no-such-flag", 2, []string{"usage: vllm serve", "vllm serve: error: unrecognized arguments: --no-such-flag\n"}},
		{"an unknown fault", "--sim-fault oom-lod", 2, []string{`did you mean "oom-load"`}},
	} {
		for _, process := range []string{"", " --sim-engine-process"} {
			t.Run(row.name+process, func(t *testing.T) {
				t.Parallel()
				s := startSim(t, strings.Fields(row.flags+process)...)
				if code := s.end().ExitCode(); code != row.code {
					t.Errorf("exit code %d, want %d", code, row.code)
				}
				text := s.log()
				if missing := inOrder(text, row.want); missing != "" {
					t.Errorf("the log lacks %q, or has it in another order", missing)
				}
				if own := strings.Contains(text, "EngineCore_DP0 pid=") && s.engine() != s.cmd.Process.Pid; own && process == "" {
					t.Error("the engine has its own PID in the log although it has no process")
				} else if !own && process != "" && strings.Contains(text, "Starting to load") {
					t.Error("the engine's log lines have the API server's PID")
				}
			})
		}
	}
}

func TestAPortThatIsTakenIsRefusedBeforeTheLoad(t *testing.T) {
	t.Parallel()
	first := readySim(t)
	_, port, _ := strings.Cut(strings.TrimPrefix(first.url, "http://"), ":")
	second := startSim(t, "--port", port)
	if code := second.end().ExitCode(); code != 1 || !strings.Contains(second.log(), "OSError: [Errno 98] Address already in use") || strings.Contains(second.log(), "Starting to load") {
		t.Errorf("the second server exits with %d, want 1 and vLLM's message before the load", code)
	}
}

// Before a server is ready, its port is bound, but the kernel refuses connections. With the fault named bind-late the
// port is not bound either.
func TestServersThatTakeTheirTime(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, flags string // %s in the flags is the time for which the server waits
		at          string // the last log line before the server waits
		binds       bool   // the port is bound while the server waits
	}{
		{"a slow load", "--sim-fault slow-start:for=%s", "Starting to load model", true},
		{"a load that ends late", "--sim-fault never-ready:for=%s --sim-engine-process", "Starting to load model", true},
		{"a port that is bound late", "--sim-fault bind-late:for=%s", "Starting vLLM API server 0 on", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			inTime(t, 600*time.Millisecond, func(d time.Duration) bool {
				begin := time.Now()
				s := startSim(t, strings.Fields(fmt.Sprintf(row.flags, d))...)
				await(t, "the server waits", func() bool { return strings.Contains(s.log(), row.at) })
				health, bound := s.health(), isBound(t, s.url)
				onTime := time.Since(begin) < d // the server began to wait later than begin was taken
				if onTime && health != 0 {
					t.Error("the server answers before it is ready")
				}
				if onTime && bound != row.binds {
					t.Errorf("the port is bound: %v, want %v", bound, row.binds)
				}
				await(t, "the server is ready", func() bool { return s.health() == 200 })
				if took := time.Since(begin); took < d {
					t.Errorf("the server is ready after %v, want at least %v", took, d)
				}
				endAtSIGTERM(t, s)
				return onTime
			})
		})
	}
	t.Run("a load that never ends", func(t *testing.T) {
		t.Parallel()
		s := startSim(t, "--sim-fault", "never-ready")
		await(t, "the server waits", func() bool { return strings.Contains(s.log(), "Starting to load model") })
		readySim(t).meanwhile(t)
		if s.health() != 0 || !isBound(t, s.url) {
			t.Error("the server answers, or its port is not bound")
		}
		endAtSIGTERM(t, s)
	})
}

func endAtSIGTERM(t *testing.T, s *simProcess) {
	t.Helper()
	s.signal(syscall.SIGTERM)
	if code := s.end().ExitCode(); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
}

// isBound reports whether a process has bound a port of the loopback interface.
func isBound(t *testing.T, address string) bool {
	t.Helper()
	u, err := url.Parse(address)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(u.Port())
	if err != nil {
		t.Fatal(err)
	}
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(socket)
	return unix.Bind(socket, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}) == unix.EADDRINUSE
}
