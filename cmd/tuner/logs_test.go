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
	"time"

	"vllmtuner/studies"
	"vllmtuner/studies/logs"
	"vllmtuner/trial"
)

// A followed is a running `tuner logs -f`.
type followed struct {
	cmd  *exec.Cmd
	out  chan string     // pieces of the command's stdout and stderr; closed when the command ends
	seen strings.Builder // the pieces received from out
}

// follow starts `tuner logs -f` with args.
func follow(t *testing.T, args ...string) *followed {
	t.Helper()
	return followBy(t, tunerPath(t), append([]string{"logs", "-f"}, args...)...)
}

// followBy starts a program and collects its output.
func followBy(t *testing.T, program string, args ...string) *followed {
	t.Helper()
	f := &followed{out: make(chan string)}
	f.cmd = exec.CommandContext(context.WithoutCancel(t.Context()), program, args...)
	out, err := f.cmd.StdoutPipe()
	must(t, err)
	f.cmd.Stderr = f.cmd.Stdout
	must(t, f.cmd.Start())
	go func() { // ends when the command ends
		defer close(f.out)
		buffer := make([]byte, 4<<10)
		for {
			n, err := out.Read(buffer)
			if n > 0 {
				f.out <- string(buffer[:n])
			}
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = f.cmd.Process.Kill() // usually fails, because the command has ended
		for range f.out {
		}
		_ = f.cmd.Wait() // usually fails, because followed.end has waited
	})
	return f
}

// waitFor waits until the command has printed a text.
func (f *followed) waitFor(t *testing.T, text string) {
	t.Helper()
	limit := time.After(30 * time.Second)
	for !strings.Contains(f.seen.String(), text) {
		select {
		case piece, ok := <-f.out:
			if !ok {
				t.Fatalf("it ended before it printed %q: %q", text, &f.seen)
			}
			f.seen.WriteString(piece)
		case <-limit:
			t.Fatalf("it has not printed %q within 30 s: %q", text, &f.seen)
		}
	}
}

// end waits until the command has ended, and returns its exit code.
func (f *followed) end(t *testing.T) int {
	t.Helper()
	limit := time.After(30 * time.Second)
	for {
		select {
		case piece, ok := <-f.out:
			if !ok {
				_ = f.cmd.Wait() // an error is in the exit code
				return f.cmd.ProcessState.ExitCode()
			}
			f.seen.WriteString(piece)
		case <-limit:
			t.Fatalf("it has not ended within 30 s: %q", &f.seen)
		}
	}
}

// aLiveStudy begins a study of a server over HTTP, and its trial 0, which stays unfinished.
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

// logs -f waits for the log, prints it as it grows, and ends at the log's end when the trial is done.
func TestALogIsFollowedUntilItsTrialIsDone(t *testing.T) {
	t.Parallel()
	root, store := aLiveStudy(t)
	missing := exec.CommandContext(t.Context(), tunerPath(t), "logs", "small", "0", "--root", root)
	if out, err := missing.CombinedOutput(); missing.ProcessState.ExitCode() != exitFailed || !strings.Contains(string(out), "its server is not started yet; -f waits for it") {
		t.Errorf("without a log, tuner logs ends with %v and says %q; want exit code 1 and the reason", err, out)
	}
	f := follow(t, "small", "0", "--root", root)
	const waiting = "waiting for the log of trial 0: its server is not started yet\n"
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
	if code := f.end(t); code != 0 || f.seen.String() != waiting+"line 0\nline 1\nthe end\n" {
		t.Errorf("it ends with %d and printed %q", code, &f.seen)
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
			f := follow(t, "small", "0", "--root", root)
			f.waitFor(t, row.sign)
			must(t, f.cmd.Process.Signal(syscall.SIGINT))
			if code := f.end(t); code != exitInterrupted || !strings.Contains(f.seen.String(), "tuner: stopped following the log of trial 0") {
				t.Errorf("after SIGINT it ends with %d and printed %q", code, &f.seen)
			}
		})
	}
}

func TestRangesOfNumbers(t *testing.T) {
	for want, numbers := range map[string][]int{
		"": {}, "3": {3}, "0 to 4": {0, 1, 2, 3, 4}, "0, 2 to 3, 7": {0, 2, 3, 7},
	} {
		if got := ranges(numbers); got != want {
			t.Errorf("ranges(%v) = %q, want %q", numbers, got, want)
		}
	}
}
