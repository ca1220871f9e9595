package main

import (
	"context"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"testing"

	"vllmtuner/studies"
	"vllmtuner/studies/prior"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// An import that the user stops is an interruption, not a usage error, and begins no study.
func TestAnImportCanBeInterrupted(t *testing.T) {
	path, root := writeStudy(t, inVirtual, 2, 60), t.TempDir()
	result := filepath.Join(t.TempDir(), "result.txt")
	const row = "max_num_seqs: 8, max_num_batched_tokens: 512, request_rate: 20, e2el: 400, throughput: 18, goodput: 18\n"
	must(t, os.WriteFile(result, []byte(row), 0o644))
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

// An import that cannot store all priors stores none, and leaves a stopped study.
func TestAnImportStoresAllOrNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "study")
	of := func(path string, rate float64) prior.Source {
		one := studies.Trial{Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Bound: capacity.AtLeast}}}
		return prior.Source{Name: path, Path: path, Taken: []studies.Trial{one}}
	}
	for _, c := range []struct {
		rate float64
		want int
	}{{math.Inf(1), 0}, {3, 2}} {
		err := storePriors(t.Context(), dir, studies.New{Name: "study"}, 0, []prior.Source{of("a", 2), of("b", c.rate)})
		study, readErr := studies.ReadSnapshot(dir)
		if (err == nil) != (c.want > 0) || readErr != nil || len(study.Prior) != c.want || study.State != studies.Stopped || study.Note != "begun by `tuner import`; `tuner run` goes on" {
			t.Errorf("with a rate of %g the import ends with %v and leaves %d priors in a study that is %s, %s (%v); want %d in a stopped study", c.rate, err, len(study.Prior), study.State, study.Note, readErr, c.want)
		}
	}
}
