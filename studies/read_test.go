package studies

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/studies/fence"
)

func TestReadSnapshotSaysWhatIsMissing(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"llama70b-h200", "qwen32b"} {
		study := llama
		study.Name = name
		s, _, err := Open(context.Background(), filepath.Join(root, name), study, Options{})
		try(t, err, s.Close())
	}
	killed := filepath.Join(root, "killed")
	try(t, os.MkdirAll(filepath.Join(killed, fence.SlotDir), 0o755), os.WriteFile(filepath.Join(killed, fence.SlotDir, "000000000001"), nil, 0o644),
		os.MkdirAll(filepath.Join(root, "home", "snap", "firefox"), 0o755), // which is no study

		os.Mkdir(filepath.Join(root, "no-study"), 0o755))
	empty := t.TempDir()
	for _, c := range []struct {
		name string
		dir  string
		want string
	}{
		{"a name with a slip", filepath.Join(root, "lama70b-h200"),
			`no study "lama70b-h200" in ROOT: did you mean "llama70b-h200"? There are: killed, llama70b-h200, qwen32b`},
		{"a name like no other", filepath.Join(root, "zzz"), `no study "zzz" in ROOT: there are: killed, llama70b-h200, qwen32b`},
		{"a root without studies", filepath.Join(empty, "x"), "no study EMPTY/x: there are none in EMPTY"},
		{"a first run that was killed", killed, "study ROOT/killed has no snapshot yet: its first run was killed while it began, or they were removed; run it again"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ReadSnapshot(c.dir)
			want := strings.NewReplacer("ROOT", root, "EMPTY", empty).Replace(c.want)
			if err == nil || err.Error() != want {
				t.Errorf("error %v, want %s", err, want)
			}
			if later := c.dir == killed; errors.Is(err, ErrUnusable) == later {
				t.Errorf("%v wraps ErrUnusable: %t", err, !later)
			}
		})
	}
	torn := filepath.Join(killed, snapshotDir, "000000000001-000000000001.db")
	try(t, os.Mkdir(filepath.Dir(torn), 0o755), os.WriteFile(torn, []byte("torn"), 0o644))
	_, err := ReadSnapshot(killed)
	wantUnusable(t, err, "read "+torn, "not a database")
}

func TestList(t *testing.T) {
	root := t.TempDir()
	for _, name := range []string{"b", "a"} {
		study := llama
		study.Name = name
		s, _, err := Open(context.Background(), filepath.Join(root, name), study, Options{})
		try(t, err, s.Close())
	}
	try(t, os.Mkdir(filepath.Join(root, "c"), 0o755))
	names, err := List(root)
	try(t, err)
	if !slices.Equal(names, []string{"a", "b"}) {
		t.Errorf("List = %q, want a and b", names)
	}
	if names, err := List(filepath.Join(root, "nowhere")); err != nil || names != nil {
		t.Errorf("List of no directory = %q, %v; want nothing", names, err)
	}
	_, err = List(filepath.Join(root, "a", currentFile))
	wantError(t, err, "list the studies", "not a directory")
}

func examineError(dir string) error {
	_, err := ExamineDisk(dir)
	return err
}

func TestExamineDisk(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "file")
	try(t, os.WriteFile(file, nil, 0o644), examineError(filepath.Join(root, "studies", "llama70b")))
	entries, err := os.ReadDir(root)
	try(t, err)
	if len(entries) != 1 {
		t.Errorf("the check left %v", entries)
	}
	wantUnusable(t, examineError(file), file+" is a file")
}

func TestValidName(t *testing.T) {
	for name, valid := range map[string]bool{
		"llama70b": true, "a": true, "qwen2.5-72b": true, "0": true, strings.Repeat("a", 63): true,
		"": false, "-a": false, ".": false, "..": false, "A": false, "a/b": false, "a b": false, "a_b": false, "ä": false,
		strings.Repeat("a", 64): false, "a\n": false, "a-": false, "a.": false, "a.yaml": false, "a.yml": false,
	} {
		if err := ValidName(name); (err == nil) != valid {
			t.Errorf("ValidName(%q) = %v, want valid: %t", name, err, valid)
		}
	}
}

// Begin and Record reach readers within a second. The second of two within one second is not lost.
func TestSnapshotsFollowByThemselves(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		s, _, err := Open(context.Background(), dir, llama, Options{})
		try(t, err, s.Begin(aTrial(0)))
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		try(t, s.Record(0, aProbe(0, 2)))
		time.Sleep(publishEvery + time.Millisecond)
		synctest.Wait()
		study, err := ReadSnapshot(dir)
		try(t, err, s.Close())
		if len(study.Trials) != 1 || len(study.Trials[0].Probes) != 1 {
			t.Errorf("after a second readers see %+v", study.Trials)
		}
	})
}

// Finish and SetState reach readers before they return.
func TestSnapshotsThatAreWaitedFor(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for n := range 3 {
		try(t, s.Begin(aTrial(n)), s.Record(n, aProbe(0, 2)), s.Finish(n, aResult(2)))
		study, err := ReadSnapshot(dir)
		try(t, err)
		if len(study.Trials) != n+1 || study.Trials[n].State != Done {
			t.Errorf("after Finish %d readers see %+v", n, study.Trials)
		}
	}
	try(t, s.SetState(Done, "all trials are done"))
	study, err := ReadSnapshot(dir)
	try(t, err)
	if study.State != Done || study.Note != "all trials are done" {
		t.Errorf("after SetState readers see %s, %s", study.State, study.Note)
	}
	entries, err := os.ReadDir(dir)
	try(t, err)
	for _, e := range entries {
		if !slices.Contains([]string{fence.SlotDir, "owners", snapshotDir, filepath.Base(filepath.Dir(s.path))}, e.Name()) {
			t.Errorf("%s is left in the directory", e.Name())
		}
	}
}

// Readers beside a busy writer always find a whole study, and it never goes back.
func TestReadersBesideAWriter(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			last := 0
			for {
				select {
				case <-stop:
					return
				default:
				}
				study, err := ReadSnapshot(dir)
				if err != nil {
					t.Errorf("read beside the writer: %v", err)
					return
				}
				if len(study.Trials) < last {
					t.Errorf("%d trials after %d", len(study.Trials), last)
				}
				last = len(study.Trials)
			}
		})
	}
	defer readers.Wait()
	defer close(stop)
	for n := range 15 {
		try(t, s.Begin(aTrial(n)), s.Record(n, aProbe(0, 2)), s.Finish(n, aResult(2)))
	}
}

func TestSeveralWritersOfOneStore(t *testing.T) {
	s := open(t, t.TempDir())
	var workers sync.WaitGroup
	for n := range 6 {
		workers.Go(func() {
			for _, err := range []error{s.Begin(aTrial(n)), s.Record(n, aProbe(0, 2)), s.Finish(n, aResult(2))} {
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	study, err := s.Study()
	try(t, err)
	if len(study.Trials) != 6 {
		t.Errorf("%d trials, want 6", len(study.Trials))
	}
}
