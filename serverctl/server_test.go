package serverctl

import (
	"context"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestADeathUnderLoadHasAClass(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	oom := filepath.Join(dir, "oom.log")
	if err := os.WriteFile(oom, []byte("(EngineCore_DP0 pid=2) ERROR 11-20 21:23:37 [core.py:936] EngineCore encountered a fatal error.\n"+
		"(EngineCore_DP0 pid=2) ERROR 11-20 21:23:37 [core.py:936] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name, role string
		class      Class
		evidence   string
		code       int
	}{
		{"an end in good order is nobody's fault", "crash /dev/null", Infrastructure, "ended by itself: exit status 0", 0},
		{"out of memory with exit code 0", "crash " + oom, OOMLoad, "CUDA out of memory", 0},
		{"a dead engine behind a living API server", "dead-engine", CrashLoad, "EngineDeadError", -1},
		{"a server that answers nothing any more", "deaf", Hang, "/health failed 3 times in a row", -1},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			c, _ := config(row.role)
			s := start(t, c)
			if s.Err() != nil {
				t.Fatalf("Err() = %v before the death", s.Err())
			}
			s.call(t.Context(), http.MethodPost, "/v1/completions", map[string]string{"model": "tiny", "prompt": "x"}, time.Second)
			select {
			case <-s.Exited():
			case <-time.After(10 * time.Second):
				t.Fatal("Exited is not closed after 10 s")
			}
			exit, ok := errors.AsType[*ExitError](s.Err())
			if !ok || exit.Class != row.class || exit.Code != row.code || !strings.Contains(exit.Evidence, row.evidence) {
				t.Errorf("Err() = %#v, want class %s, code %d, evidence with %q", s.Err(), row.class, row.code, row.evidence)
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
	if !ok || exit.Class != Hang || !strings.Contains(exit.Evidence, "still 3 running and 0 waiting after 300ms") {
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
		want       string // in the error; empty means success
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
