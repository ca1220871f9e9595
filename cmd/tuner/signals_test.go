package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"vllmtuner/studies/logs"
)

// When its terminal closes, the tuner ends as it does after SIGTERM, unless it runs under nohup.
func TestAClosingTerminalEndsTheTuner(t *testing.T) {
	t.Parallel()
	hangups := make(chan os.Signal, 1) // if the test runs under nohup, this handler keeps its children from ignoring SIGHUP
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	root, store := aLiveStudy(t)
	log := logs.Create(store.Dir(), 0)
	defer func() { must(t, log.Close()) }()
	line := func(n int) {
		t.Helper()
		if _, err := fmt.Fprintf(log, "line %d\n", n); err != nil {
			t.Fatal(err)
		}
	}
	line(0)
	hangUp := func(f *startedCommand) {
		t.Helper()
		f.waitFor(t, "line 0\n")
		must(t, f.cmd.Process.Signal(syscall.SIGHUP))
	}
	plain := follow(t, root)
	hangUp(plain)
	if text, code := plain.end(t); code != exitInterrupted || !strings.Contains(text, "stopped following the log of trial") {
		t.Errorf("after SIGHUP tuner logs ends with %d and printed %q", code, text)
	}
	kept := followInShell(t, `trap "" HUP`, root)
	hangUp(kept)
	line(1)
	kept.waitFor(t, "line 1\n")
	must(t, kept.cmd.Process.Signal(syscall.SIGTERM))
	if text, code := kept.end(t); code != exitInterrupted {
		t.Errorf("under nohup, after SIGHUP and SIGTERM, tuner logs ends with %d and printed %q", code, text)
	}
}

// followInShell is like follow, but starts a shell that first runs one command and then becomes tuner.
func followInShell(t *testing.T, first, root string) *startedCommand {
	t.Helper()
	words := []string{"-c", first + `; exec "$@"`, "sh", tunerPath(t), "logs", "-f", "small", "0", "--root", root}
	return launch(t, exec.CommandContext(context.WithoutCancel(t.Context()), "sh", words...))
}

// A crashed tuner leaves no core dump with its keys, even if the user allows core dumps.
func TestATunerLeavesNoCore(t *testing.T) {
	root, store := aLiveStudy(t)
	log := logs.Create(store.Dir(), 0)
	_, err := fmt.Fprintln(log, "line 0")
	must(t, err, log.Close())
	dumps := func(cmd *exec.Cmd) bool {
		status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if !status.Signaled() || status.Signal() != syscall.SIGABRT {
			t.Fatalf("%q ends with %v, want SIGABRT", cmd.Args, cmd.ProcessState)
		}
		return status.CoreDump()
	}
	dir := t.TempDir()
	t.Chdir(dir)
	other := exec.CommandContext(context.WithoutCancel(t.Context()), "sh", "-c", "ulimit -Sc unlimited; kill -ABRT $$")
	if err := other.Run(); err == nil || !dumps(other) {
		t.Skip("this machine allows no core dumps, so the test would prove nothing: allow them (ulimit -Hc, kernel.core_pattern)")
	}
	t.Setenv("GOTRACEBACK", "crash")
	f := followInShell(t, "ulimit -Sc unlimited", root)
	f.waitFor(t, "line 0\n")
	must(t, f.cmd.Process.Signal(syscall.SIGQUIT))
	f.end(t)
	if dumps(f.cmd) {
		t.Error("the tuner left a core dump")
	}
	cores, err := filepath.Glob("core*")
	for _, core := range cores {
		err = errors.Join(err, os.Remove(core))
	}
	if err != nil {
		t.Error(err)
	}
}
