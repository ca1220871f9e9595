package serverctl

import (
	"context"
	"errors"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/host"
)

// oomCounter returns a machine whose kernel has killed two processes for lack of memory, and a function that raises
// this number to three.
func oomCounter(t *testing.T) (machine host.Reader, kill func()) {
	t.Helper()
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("proc/self/cgroup", "0::/pod\n")
	write("proc/self/mountinfo", "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	const events = "sys/fs/cgroup/pod/memory.events"
	write(events, "max 7\noom 1\noom_kill 2\n")
	return host.Reader{Root: os.DirFS(root)}, func() { write(events, "max 7\noom 1\noom_kill 3\n") }
}

// awaitDeath waits until a server has died, and returns why.
func awaitDeath(t *testing.T, s *Server) *ExitError {
	t.Helper()
	select {
	case <-s.Exited():
	case <-time.After(hangLimit):
		t.Fatalf("Exited is not closed after %v", hangLimit)
	}
	exit, ok := errors.AsType[*ExitError](s.Err())
	if !ok {
		t.Fatalf("Err() = %v, want an *ExitError", s.Err())
	}
	return exit
}

func TestADeathUnderLoadHasAClass(t *testing.T) {
	t.Parallel()
	hangups := make(chan os.Signal, 1) // with this handler, the children do not ignore SIGHUP even under nohup
	signal.Notify(hangups, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(hangups) })
	oom := filepath.Join(t.TempDir(), "oom.log")
	if err := os.WriteFile(oom, []byte("(EngineCore_DP0 pid=2) ERROR 11-20 21:23:37 [core.py:936] EngineCore encountered a fatal error.\n"+
		"(EngineCore_DP0 pid=2) ERROR 11-20 21:23:37 [core.py:936] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	const request = 0 // stands in place of a signal: the test sends a request that makes the fake server die
	for _, row := range []struct {
		name, role string
		signal     syscall.Signal
		counted    bool // whether the kernel counts the server as killed for lack of memory
		class      Class
		cause      Cause
		evidence   string
		code       int
	}{
		{"an end in good order is nobody's fault", "crash /dev/null", request, false, Infrastructure, ExitZero, "ended by itself: exit status 0", 0},
		{"out of memory with exit code 0", "crash " + oom, request, false, OOMLoad, "", "CUDA out of memory", 0},
		{"a dead engine behind a living API server", "dead-engine", request, false, CrashLoad, EngineDead, "EngineDeadError", -1},
		{"a server that answers nothing any more", "deaf", request, false, Hang, Deaf, "/health failed 3 times in a row", -1},
		{"asked to end, and waits for its clients", "asked", request, false, Infrastructure, Terminated, "Shutting down FastAPI HTTP server.", -1},
		{"killed", "serve", syscall.SIGKILL, false, Infrastructure, Killed, "signal: killed", -1},
		{"killed for lack of memory", "serve", syscall.SIGKILL, true, Infrastructure, HostOOM,
			"killed 1 of the processes in this cgroup for lack of memory (/sys/fs/cgroup/pod/memory.events)", -1},
		{"hung up", "serve", syscall.SIGHUP, true, Infrastructure, Terminated, "signal: hangup", -1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c, _ := config(row.role)
			machine, kill := oomCounter(t)
			c.machine = machine
			if row.role == "deaf" || row.role == "asked" { // the servers of the other rows answer, or end
				c.limits.healthTimeout = time.Second
			}
			s := start(t, c)
			if s.Err() != nil {
				t.Fatalf("Err() = %v before the death", s.Err())
			}
			if row.counted {
				kill()
			}
			if row.signal == request {
				s.client.call(t.Context(), http.MethodPost, "/v1/completions", map[string]string{"model": "tiny", "prompt": "x"}, hangLimit)
			} else if err := syscall.Kill(s.process.Record().PID, row.signal); err != nil {
				t.Fatal(err)
			}
			exit := awaitDeath(t, s)
			if exit.Class != row.class || exit.Cause != row.cause || exit.Code != row.code || !strings.Contains(exit.Evidence, row.evidence) {
				t.Errorf("Err() = %#v, want %s (%s), code %d, evidence with %q", exit, row.class, row.cause, row.code, row.evidence)
			}
			if _, err := s.Stop(t.Context()); err != nil {
				t.Errorf("Stop() = %v", err)
			}
		})
	}
}

func TestDrainOfABusyServerSaysWhatItWaitedFor(t *testing.T) {
	t.Parallel()
	c, _ := config("busy")
	s := start(t, c)
	_, err := s.Drain(t.Context())
	exit, ok := errors.AsType[*ExitError](err)
	if !ok || exit.Class != Hang || !strings.Contains(exit.Evidence, "still 3 running and 0 waiting after 300 ms") {
		t.Errorf("Drain() = %v", err)
	}
	s.config.limits.drain = time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := s.Drain(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Drain() = %v, want the context's end", err)
	}
}

func TestResetCacheChecksThatItHappened(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name, role string
		devMode    string
		want       string // text in the error; empty means success
	}{
		{"0.14.1 tells by its log", "reset-old", "1", ""},
		{"0.33 tells by its answer", "reset-new", "1", ""},
		{"a silent log leaves the KV usage", "reset-silent", "1", ""},
		{"blocks that are never freed in 0.14.1", "reset-old never", "1", "still in use after 10 attempts"},
		{"a server without the endpoint", "reset-new", "0", "VLLM_SERVER_DEV_MODE=1"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c, _ := config(row.role)
			c.Env["VLLM_SERVER_DEV_MODE"] = row.devMode
			s := start(t, c)
			err := s.ResetCache(t.Context())
			if row.want == "" && err != nil || row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)) {
				t.Errorf("ResetCache() = %v, want %q", err, row.want)
			}
		})
	}
}
