package studies

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"vllmtuner/studies/fence"
)

// A study is running only while its owner lives. A copy of a study's directory looks as if the owner was killed,
// because nobody holds a lock in the copy.
func TestStateWhenTheOwnerIsDead(t *testing.T) {
	live := func(dir string) Study {
		t.Helper()
		study, err := ReadLive(t.Context(), dir, ReadSnapshot)
		try(t, err)
		return study
	}
	killed := func(dir string) string {
		t.Helper()
		to := filepath.Join(t.TempDir(), "llama70b")
		try(t, os.CopyFS(to, os.DirFS(dir)))
		return to
	}
	dir := filepath.Join(t.TempDir(), "llama70b")
	s := open(t, dir)
	if study := live(dir); study.State != Running || !study.Life.Alive {
		t.Errorf("while its owner lives the study is %s, alive %t; want running, alive", study.State, study.Life.Alive)
	}
	if study := live(killed(dir)); study.State != NotBegun {
		t.Errorf("killed before its first trial, the study is %s, want %s", study.State, NotBegun)
	}
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
	try(t, s.publishNow())
	if study := live(killed(dir)); study.State != Stopped || !study.Life.Gone || study.Life.Owner.PID != os.Getpid() {
		t.Errorf("after its owner was killed the study is %s with %+v, want %s", study.State, study.Life, Stopped)
	}
	try(t, s.SetState(Done, ""), s.Close())
	if study := live(dir); study.State != Done || !reflect.DeepEqual(study.Life, fence.Life{}) {
		t.Errorf("the finished study is %s with %+v, want %s without an owner", study.State, study.Life, Done)
	}
}

// A study may end after ReadLive has read it and before ReadLive looks for its owner. ReadLive then returns the study's
// final state, not Stopped.
func TestStudyEndsDuringReadLive(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "llama70b")
	s := open(t, dir)
	reads := 0
	study, err := ReadLive(t.Context(), dir, func(dir string) (Study, error) {
		study, err := ReadSnapshot(dir)
		if reads++; reads == 1 {
			try(t, s.SetState(Failed, "no model"), s.Close())
		}
		return study, err
	})
	try(t, err)
	if study.State != Failed || reads != 2 {
		t.Errorf("ReadLive = %s after %d reads, want %s after 2", study.State, reads, Failed)
	}
}

// ReadLive reads a study again only if a newer snapshot was published meanwhile, because a long study takes time to
// read.
func TestAStoppedStudyIsReadOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "llama70b")
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Close())
	reads := 0
	study, err := ReadLive(t.Context(), dir, func(dir string) (Study, error) {
		reads++
		return ReadSnapshot(dir)
	})
	try(t, err)
	if study.State != Stopped || len(study.Trials) != 1 || reads != 1 {
		t.Errorf("it is %s with %d trials after %d reads, want %s with 1 after 1", study.State, len(study.Trials), reads, Stopped)
	}
}

// A study without measurements can be resumed with any study file. After one probe or one result, its world must stay
// the same.
func TestAStudyWithoutAMeasurementHasNoWorld(t *testing.T) {
	changed := New{Name: llama.Name, Seed: 8, File: "name: llama70b\n# changed\n", World: map[string]string{"model": "other", "slo": "p99 TTFT <= 9 ms"}, Final: []string{"slo"}}
	for _, c := range []struct {
		name  string
		did   func(*Store) error
		world bool
	}{
		{"no trial", func(*Store) error { return nil }, false},
		{"a trial that was begun", func(s *Store) error { return s.Begin(aTrial(0)) }, false},
		{"a probe", func(s *Store) error {
			try(t, s.Begin(aTrial(0)))
			return s.Record(0, aProbe(0, 2))
		}, true},
		{"a result", func(s *Store) error {
			try(t, s.Begin(aTrial(0)))
			return s.Finish(0, aResult(2))
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, dir)
			try(t, c.did(s), s.Close())
			s, _, err := Open(context.Background(), dir, changed, Options{})
			if c.world {
				wantError(t, err, "these values changed since the study began", "slo: ")
				return
			}
			try(t, err)
			try(t, s.Begin(Trial{Number: 0, Origin: Default, Args: []string{"--other"}}), s.Close())
			study, err := ReadSnapshot(dir)
			try(t, err)
			if !reflect.DeepEqual(study.World, changed.World) || study.Seed != 8 || len(study.Trials) != 1 || len(study.Trials[0].Args) != 1 || len(study.Changes()) != 0 {
				t.Errorf("it goes on as %+v", study)
			}
		})
	}
}

// A study with priors must keep its SLO, because the priors were judged by it. The rest of the world may change, as
// there are no measurements.
func TestPriorsKeepTheSLO(t *testing.T) {
	dir := t.TempDir()
	is := llama
	is.World, is.Final = map[string]string{"model": "m", "slo": "60 ms"}, []string{"slo"}
	s, _, err := Open(context.Background(), dir, is, Options{})
	try(t, err)
	prior := aTrial(0)
	prior.Origin, prior.State, prior.Result = Prior, Done, aResult(2)
	try(t, s.AddPriors([]Source{{Path: "/a", Trials: []Trial{prior}}}), s.Close())
	is.World = map[string]string{"model": "other", "slo": "60 ms"}
	s, _, err = Open(context.Background(), dir, is, Options{})
	try(t, err, s.Close())
	is.World = map[string]string{"model": "other", "slo": "50 ms"}
	_, _, err = Open(context.Background(), dir, is, Options{})
	wantError(t, err, "slo: 60 ms → 50 ms")
}
