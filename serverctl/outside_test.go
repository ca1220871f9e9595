package serverctl

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"vllmtuner/serverctl/host"
)

// oomCounter is a machine whose kernel says how many processes it ended for lack of memory.
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
	const request = 0 // no signal: the fake plays it when it is asked
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
			} else if err := syscall.Kill(s.process.PID(), row.signal); err != nil {
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

func TestEndingCode(t *testing.T) {
	for ending, want := range map[string]int{
		"signal: killed": -9, "the server's first process was ended: signal: aborted (core dumped)": -6, "signal: segmentation fault": -11,
		"signal: hangup": -1, "exit status 3": 3, "": 0,
	} {
		code := -1
		if want > 0 {
			code = want
		}
		if got := endingCode(code, ending); got != want {
			t.Errorf("endingCode(%d, %q) = %d, want %d", code, ending, got, want)
		}
	}
}

// An engine of 0.14.1 that crashes says no more than one that is killed, unless Python's fault handler does.
func TestTheServersPythonTellsOfCrashes(t *testing.T) {
	if environ := (Config{}).environ(); !strings.Contains(strings.Join(environ, "\n"), "\nPYTHONFAULTHANDLER=1\n") {
		t.Errorf("environ() = %q", environ)
	}
	if environ := (Config{Env: map[string]string{"PYTHONFAULTHANDLER": ""}}).environ(); strings.Contains(strings.Join(environ, "\n"), "PYTHONFAULTHANDLER=1") {
		t.Error("the user's word does not count")
	}
}
