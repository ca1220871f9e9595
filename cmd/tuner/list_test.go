package main

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"vllmtuner/studies"
	"vllmtuner/trial"
)

// The GPU time of a study includes its running trial.
func TestListCountsTheGPUTimeOfARunningTrial(t *testing.T) {
	root := t.TempDir()
	store, _, err := studies.Open(context.Background(), filepath.Join(root, "s"), studies.New{Name: "s"}, studies.Options{})
	must(t, err)
	must(t, store.Begin(studies.Trial{}), store.Record(0, trial.Probe{GPUTime: 9 * time.Second}),
		store.Record(0, trial.Probe{Seq: 1, GPUTime: 10 * time.Second}), store.Close())
	list, err := listStudies(t.Context(), root)
	must(t, err)
	if len(list.Studies) != 1 || list.Studies[0].GPU != 19 {
		t.Errorf("the list is %+v, want one study with 19 s of GPU time", list.Studies)
	}
}
