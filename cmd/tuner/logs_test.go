package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/studies/logs"
	"vllmtuner/trial"
)

// follow starts `tuner logs -f` for trial 0 of aLiveStudy.
func follow(t *testing.T, root string) *startedCommand {
	t.Helper()
	return launch(t, tunerCommand(context.WithoutCancel(t.Context()), t, "logs", "-f", "small", "0", "--root", root))
}

// aLiveStudy begins a study of a server over HTTP. It also begins trial 0, and leaves it unfinished.
func aLiveStudy(t *testing.T) (root string, store *studies.Store) {
	t.Helper()
	root = t.TempDir()
	file := fmt.Sprintf(smallStudy, overHTTP, 6, 2.0)
	store, _, err := studies.Open(t.Context(), filepath.Join(root, "small"), studies.New{Name: "small", Seed: 3, File: file}, studies.Options{})
	must(t, err)
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	must(t, errors.Join(store.Begin(studies.Trial{Number: 0, Origin: studies.Default}), store.SetState(studies.Running, "")))
	return root, store
}

// logs -f waits for the log and prints it as it grows. When the trial is done, logs -f prints the rest of the log and
// ends.
func TestALogIsFollowedUntilItsTrialIsDone(t *testing.T) {
	t.Parallel()
	root, store := aLiveStudy(t)
	missing := exec.CommandContext(t.Context(), tunerPath(t), "logs", "small", "0", "--root", root)
	if out, err := missing.CombinedOutput(); missing.ProcessState.ExitCode() != exitFailed || !strings.Contains(string(out), "its server has not started yet; -f waits for it") {
		t.Errorf("without a log, tuner logs ends with %v and says %q; want exit code 1 and the reason", err, out)
	}
	f := follow(t, root)
	const waiting = "waiting for the log of trial 0: its server has not started yet\n"
	f.waitFor(t, waiting)
	log := logs.Create(store.Dir(), 0)
	for i := range 2 {
		if _, err := fmt.Fprintf(log, "line %d\n", i); err != nil {
			t.Fatal(err)
		}
		f.waitFor(t, fmt.Sprintf("line %d\n", i))
	}
	if _, err := io.WriteString(log, "\x1b[31mthe end\x1b[0m\n"); err != nil {
		t.Fatal(err)
	}
	must(t, errors.Join(log.Close(), store.Finish(0, trial.Result{Outcome: trial.Infeasible, Class: "start-crash"})))
	if text, code := f.end(t); code != 0 || text != waiting+"line 0\nline 1\nthe end\n" {
		t.Errorf("it ends with %d and printed %q", code, text)
	}
}

func TestFollowingALogIsInterrupted(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ name, log, sign string }{
		{"the log is being printed", "a line\n", "a line\n"},
		{"the log does not exist yet", "", "waiting for the log of trial 0"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			root, store := aLiveStudy(t)
			if row.log != "" {
				folder := filepath.Join(store.Dir(), "logs")
				err := errors.Join(os.Mkdir(folder, 0o755), os.WriteFile(filepath.Join(folder, "trial-0000.log"), []byte(row.log), 0o644))
				must(t, err)
			}
			f := follow(t, root)
			f.waitFor(t, row.sign)
			must(t, f.cmd.Process.Signal(syscall.SIGINT))
			if text, code := f.end(t); code != exitInterrupted || !strings.Contains(text, "tuner: stopped following the log of trial 0") {
				t.Errorf("after SIGINT it ends with %d and printed %q", code, text)
			}
		})
	}
}
