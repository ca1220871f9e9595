package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A run or a delete that the user stops before it owns the study changes nothing.
func TestWaitingForAStudyCanBeInterrupted(t *testing.T) {
	path, root := writeStudy(t, inVirtual, 1, 2), t.TempDir()
	args := []string{"tuner", "run", path, "--root", root}
	must(t, app(io.Discard, io.Discard, nil).RunContext(t.Context(), flagsFirst(args)))
	dirs, err := filepath.Glob(filepath.Join(root, "*"))
	if err != nil || len(dirs) != 1 {
		t.Fatalf("the root holds %v, %v; want one study", dirs, err)
	}
	epochs := func() []string {
		t.Helper()
		names, err := filepath.Glob(filepath.Join(dirs[0], "e*"))
		must(t, err)
		return names
	}
	before := epochs()
	interrupted := make(chan struct{})
	close(interrupted)
	for _, args := range [][]string{args, {"tuner", "delete", dirs[0]}} {
		err := app(io.Discard, io.Discard, interrupted).RunContext(t.Context(), flagsFirst(args))
		if exitCode(err) != exitInterrupted {
			t.Errorf("%v ends with %v (exit code %d), want an interruption", args, err, exitCode(err))
		}
		if after := epochs(); !slices.Equal(before, after) {
			t.Errorf("%v: the epochs were %v and are now %v", args, before, after)
		}
	}
	if _, err := os.Stat(dirs[0]); err != nil {
		t.Error(err)
	}
}
