package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"vllmtuner/trial"
)

func TestNoteOf(t *testing.T) {
	for _, row := range []struct {
		err          error
		note, remedy string
	}{
		{errors.New("no weights"), "no weights", ""},
		{errors.Join(errors.New("no weights"), errors.New("port in use")), "no weights; port in use", ""},
		{&trial.RemedyError{Err: errors.New("too slow"), Remedy: "use more cores"}, "too slow", "use more cores"},
	} {
		if note, remedy := noteOf(row.err); note != row.note || remedy != row.remedy {
			t.Errorf("noteOf(%v) = %q, %q, want %q, %q", row.err, note, remedy, row.note, row.remedy)
		}
	}
}

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
