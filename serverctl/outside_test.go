package serverctl

import (
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

// oomCounter returns a machine whose kernel has killed that many processes for lack of memory.
func oomCounter(t *testing.T) (machine host.Reader, count func(text string)) {
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
	count = func(text string) { write("sys/fs/cgroup/pod/memory.events", "low 0\nhigh 0\nmax 7\noom 1\n"+text) }
	count("oom_kill 2\n")
	return host.Reader{Root: os.DirFS(root)}, count
}

func TestAServerThatIsEndedFromOutside(t *testing.T) {
	t.Parallel()
	hangups := make(chan os.Signal, 1) // under nohup the children would ignore SIGHUP, were it not for a handler here
	signal.Notify(hangups, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(hangups) })
	const request = 0 // not a signal: the fake does it on request
	for _, row := range []struct {
		name     string
		role     string
		signal   syscall.Signal
		counted  string // by the kernel afterwards
		class    Class
		cause    Cause
		evidence string
	}{
		{"killed", "serve", syscall.SIGKILL, "", Infrastructure, Killed, "signal: killed"},
		{"killed for lack of memory", "serve", syscall.SIGKILL, "oom_kill 3\n", Infrastructure, HostOOM, "killed 1 of the processes here for lack of memory (/sys/fs/cgroup/pod/memory.events)"},
		{"hung up", "serve", syscall.SIGHUP, "oom_kill 3\n", Infrastructure, Terminated, "signal: hangup"},
		{"asked to end, and waits for its clients", "asked", request, "", Infrastructure, Terminated, "Shutting down FastAPI HTTP server."},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c, _ := config(row.role)
			machine, count := oomCounter(t)
			c.machine = machine
			s := start(t, c)
			if row.counted != "" {
				count(row.counted)
			}
			if row.signal == request {
				s.call(t.Context(), http.MethodPost, "/v1/completions", map[string]string{"model": "tiny", "prompt": "x"}, time.Second)
			} else if err := syscall.Kill(s.process.Record().PID, row.signal); err != nil {
				t.Fatal(err)
			}
			select {
			case <-s.Exited():
			case <-time.After(20 * time.Second):
				t.Fatal("Exited is not closed after 20 s")
			}
			exit, ok := s.Err().(*ExitError)
			if !ok || exit.Class != row.class || exit.Cause != row.cause || !strings.Contains(exit.Evidence, row.evidence) {
				t.Errorf("Err() = %#v, want %s (%s) with %q", s.Err(), row.class, row.cause, row.evidence)
			}
		})
	}
}

func TestStatusOfAnEnding(t *testing.T) {
	for want, end := range map[int]ending{
		-9: {code: -1, signal: syscall.SIGKILL}, -6: {code: -1, signal: syscall.SIGABRT}, 3: {code: 3}, 0: {code: -1},
	} {
		if got := end.status(); got != want {
			t.Errorf("status of %+v = %d, want %d", end, got, want)
		}
	}
}

// A crashed engine of 0.14.1 looks like a killed one, unless Python's fault handler reports it.
func TestTheServersPythonTellsOfCrashes(t *testing.T) {
	if environ := (Config{}).environ(); !strings.Contains(strings.Join(environ, "\n"), "\nPYTHONFAULTHANDLER=1\n") {
		t.Errorf("environ() = %q", environ)
	}
	if environ := (Config{Env: map[string]string{"PYTHONFAULTHANDLER": ""}}).environ(); strings.Contains(strings.Join(environ, "\n"), "PYTHONFAULTHANDLER=1") {
		t.Error("the user's word does not count")
	}
}
