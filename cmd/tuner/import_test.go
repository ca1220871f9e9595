package main

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/studies"
)

// An import that the user stops is an interruption, not a usage error, and begins no study.
func TestAnImportCanBeInterrupted(t *testing.T) {
	path, result, root := writeStudy(t, inVirtual, 2, 60), writeResult(t), t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := app(io.Discard, io.Discard, nil).RunContext(ctx, flagsFirst([]string{"tuner", "import", path, result, "--root", root}))
	if left, readErr := os.ReadDir(root); exitCode(err) != exitInterrupted || len(left) > 0 || readErr != nil {
		t.Errorf("the import ends with %v (exit code %d) and leaves %v, %v; want an interruption and no file", err, exitCode(err), left, readErr)
	}
	err = storePriors(ctx, filepath.Join(root, "small"), studies.New{Name: "small"}, 0, nil) // an import may be stopped while it waits for the study's owner
	if !errors.Is(err, errImportEnded) {
		t.Errorf("storing ends with %v, want %v", err, errImportEnded)
	}
}

// No import changes a study that another process owns.
func TestAnImportRefusesAStudyWithAnOwner(t *testing.T) {
	path, result, root := writeStudy(t, inVirtual, 2, 60), writeResult(t), t.TempDir()
	store, _, err := studies.Open(t.Context(), filepath.Join(root, "small"), studies.New{Name: "small"}, studies.Options{})
	must(t, err)
	defer store.Close()
	if _, stderr, code := inProcess(t, "import", path, result, "--root", root); code != exitOwned || !strings.Contains(stderr, "another tuner owns this study") {
		t.Errorf("the import ends with %d, %q, want %d and that there is an owner", code, stderr, exitOwned)
	}
}

// writeResult writes a file as auto_tune.sh does, with one result for smallStudy.
func writeResult(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "result.txt")
	const row = "max_num_seqs: 8, max_num_batched_tokens: 512, request_rate: 20, e2el: 400, throughput: 18, goodput: 18\n"
	must(t, os.WriteFile(path, []byte(row), 0o644))
	return path
}
