package main

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"vllmtuner/studies"
	"vllmtuner/trial"
)

// A trial that runs has used GPU time, though it has come to nothing yet.
func TestListHasTheGPUTimeOfWhatRuns(t *testing.T) {
	root := t.TempDir()
	store, _, err := studies.Open(context.Background(), filepath.Join(root, "s"), studies.New{Name: "s"}, studies.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		store.Begin(studies.Trial{}), store.Record(0, trial.Probe{GPUTime: 9 * time.Second}), store.Record(0, trial.Probe{Seq: 1, GPUTime: 10 * time.Second}), store.Close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	list, err := listStudies(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Studies) != 1 || list.Studies[0].GPU != 19 {
		t.Errorf("the list is %+v, want one study with 19 s", list.Studies)
	}
}

// The clock of another host may be ahead of ours.
func TestNothingIsListedAsStoredInTheFuture(t *testing.T) {
	list := studyList{Studies: []studyEntry{{Name: "s", Updated: time.Now().Add(time.Hour)}}}
	if text := list.text(80); !strings.Contains(text, " 0 s ago") {
		t.Errorf("a study that was stored by a clock ahead of ours is listed as\n%s", text)
	}
}
