package studies

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mattn/go-sqlite3"

	"vllmtuner/serverctl"
	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// beginIn begins studies in a root directory.
func beginIn(t *testing.T, root string, names ...string) {
	t.Helper()
	for _, name := range names {
		study := llama
		study.Name = name
		s, _, err := Open(t.Context(), filepath.Join(root, name), study, Options{})
		try(t, err, s.Close())
	}
}

// If a directory has no snapshot, the error of ReadSnapshot says why, and names similar studies.
func TestReadSnapshotWithoutSnapshot(t *testing.T) {
	root := t.TempDir()
	beginIn(t, root, "llama70b-h200", "qwen32b")
	killed := filepath.Join(root, "killed")
	try(t, os.MkdirAll(filepath.Join(killed, fence.SlotDir), 0o755), os.WriteFile(filepath.Join(killed, fence.SlotDir, "000000000001"), nil, 0o644),
		os.MkdirAll(filepath.Join(root, "home", "snap", "firefox"), 0o755), // this directory is no study
		os.Mkdir(filepath.Join(root, "no-study"), 0o755))
	empty := t.TempDir()
	for _, c := range []struct {
		name string
		dir  string
		want string
	}{
		{"a misspelled name", filepath.Join(root, "lama70b-h200"),
			`no study "lama70b-h200" in ROOT; did you mean "llama70b-h200"? The directory holds killed, llama70b-h200, qwen32b`},
		{"a name unlike the others", filepath.Join(root, "zzz"), `no study "zzz" in ROOT; it holds killed, llama70b-h200, qwen32b`},
		{"a root without studies", filepath.Join(empty, "x"), `no study "x": the directory EMPTY holds no study at all; to use another directory, give --root`},
		{"a first run that was killed", killed, "study ROOT/killed has no snapshot yet: its first run was killed while it began, or its snapshots were removed; run it again"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ReadSnapshot(c.dir)
			want := strings.NewReplacer("ROOT", root, "EMPTY", empty).Replace(c.want)
			if err == nil || err.Error() != want {
				t.Errorf("ReadSnapshot = %v, want %s", err, want)
			}
			if later := c.dir == killed; errors.Is(err, ErrUnusable) == later {
				t.Errorf("%v wraps ErrUnusable: %t, want %t", err, later, !later)
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
	beginIn(t, root, "b", "a")
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

func TestExamineDisk(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "file")
	try(t, os.WriteFile(file, nil, 0o644), errorOf(ExamineDisk(filepath.Join(root, "studies", "llama70b"))))
	entries, err := os.ReadDir(root)
	try(t, err)
	if len(entries) != 1 {
		t.Errorf("after ExamineDisk the directory has %v, want file alone", entries)
	}
	wantUnusable(t, errorOf(ExamineDisk(file)), file+" is a file")
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

// Readers see a Begin or Record within a second, even if it comes right after another one was published.
func TestPublishWithinASecond(t *testing.T) {
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
			t.Errorf("after a second readers see %+v, want a trial with a probe", study.Trials)
		}
	})
}

// Finish and SetState publish before they return.
func TestPublishAtOnce(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for n := range 3 {
		try(t, s.Begin(aTrial(n)), s.Record(n, aProbe(0, 2)), s.Finish(n, aResult(2)))
		study, err := ReadSnapshot(dir)
		try(t, err)
		if len(study.Trials) != n+1 || study.Trials[n].State != Done {
			t.Errorf("after Finish(%d) readers see %+v", n, study.Trials)
		}
	}
	try(t, s.SetState(Done, "all trials are done"))
	study, err := ReadSnapshot(dir)
	try(t, err)
	if study.State != Done || study.Note != "all trials are done" {
		t.Errorf("after SetState readers see %s, %s", study.State, study.Note)
	}
	try(t, s.Fail("nothing starts", "repair the machine"))
	study, err = ReadSnapshot(dir)
	try(t, err)
	if study.State != Failed || study.Explanation() != "nothing starts; repair the machine" || study.Remedy != "repair the machine" {
		t.Errorf("after Fail readers see %s, %s, %s", study.State, study.Note, study.Remedy)
	}
	try(t, s.SetState(Failed, "the disk is full"))
	if study, err = s.Study(); err != nil || study.Explanation() != "the disk is full" {
		t.Errorf("after another failure Explanation = %q, %v", study.Explanation(), err)
	}
	entries, err := os.ReadDir(dir)
	try(t, err)
	for _, e := range entries {
		if !slices.Contains([]string{fence.SlotDir, "owners", snapshotDir, filepath.Base(filepath.Dir(s.path))}, e.Name()) {
			t.Errorf("the directory has %s", e.Name())
		}
	}
}

// A note of an older tuner ends with the remedy. The note is split if a trial failed in a way that has this remedy.
func TestNotesOfOlderTuners(t *testing.T) {
	remedy := serverctl.Remedy(serverctl.Infrastructure, serverctl.HostOOM)
	for cause, want := range map[serverctl.Cause][2]string{
		serverctl.HostOOM: {"nothing starts", remedy}, serverctl.Segfault: {"nothing starts; " + remedy, ""},
	} {
		s := open(t, t.TempDir())
		dead := trial.Result{Outcome: trial.Unknown, Class: serverctl.Infrastructure, Cause: cause, Evidence: "gone"}
		try(t, s.Begin(aTrial(0)), s.Finish(0, dead), s.SetState(Failed, "nothing starts; "+remedy))
		study, err := s.Summary(func(Study) []int { return nil })
		try(t, err)
		if got := [2]string{study.Note, study.Remedy}; got != want || study.Explanation() != "nothing starts; "+remedy {
			t.Errorf("%s: Note and Remedy = %q, want %q", cause, got, want)
		}
	}
}

// While a writer is busy, readers always find a complete study, and never an older one than before.
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
					t.Errorf("ReadSnapshot = %v", err)
					return
				}
				if len(study.Trials) < last {
					t.Errorf("ReadSnapshot has %d trials, after %d before", len(study.Trials), last)
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
		t.Errorf("the study has %d trials, want 6", len(study.Trials))
	}
}

// The owner may remove an old snapshot between a reader's check and SQLite's attempt to open it. The reader then tries
// the next one, instead of calling the file damaged.
func TestASnapshotRemovedWhileItIsOpenedIsNotDamaged(t *testing.T) {
	base, delta := filepath.Join(t.TempDir(), "base"), filepath.Join(t.TempDir(), "delta")
	try(t, os.WriteFile(base, nil, 0o600))
	refused := fmt.Errorf("attach the delta to its base: %w", sqlite3.Error{Code: sqlite3.ErrCantOpen})
	if err := explainFile(refused, base, delta); isDamage(err) || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without the delta: %v, want that the file does not exist", err)
	}
	try(t, os.WriteFile(delta, nil, 0o600))
	if err := explainFile(refused, base, delta); !isDamage(err) {
		t.Errorf("with both files: %v, want that they are damaged", err)
	}
}
