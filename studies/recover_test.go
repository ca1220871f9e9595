package studies

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/studies/fence"
)

// database returns the path of the live database of a study that nobody owns.
func database(t *testing.T, dir string) string {
	t.Helper()
	folder, err := fence.OpenFolder(dir, fence.CertainLocks)
	try(t, err)
	at, err := fence.ReadPosition(folder)
	try(t, err, folder.Close())
	return filepath.Join(dir, fence.EpochDir(at.Slot.Epoch), fence.Database)
}

// interruptedStudy makes a study with a finished trial and a trial that was only begun. Its newest snapshot lacks the
// second trial.
func interruptedStudy(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s, _, err := Open(context.Background(), dir, llama, Options{})
	try(t, err, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2)))
	s.mu.Lock() // stops the publisher, which needs this mutex
	defer s.mu.Unlock()
	try(t, s.commit("begin trial 1", func(tx *transaction) error {
		insertTrial(tx, Trial{Number: 1, Origin: Sampled, Began: time.Now()}, "{}", "[]", s.commits+1)
		return nil
	}), s.release())
	close(s.stop)
	return dir
}

// namesIn returns the names in a directory.
func namesIn(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	try(t, err)
	return fileNames(entries)
}

// Open refuses a damaged or lost database. The error names the newest snapshot, and says how many commits the snapshot
// lacks.
func TestDamagedDatabase(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"overwritten": func(path string) error {
			content, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for i := 4096; i < len(content); i += 100 {
				content[i] ^= 0x55
			}
			return os.WriteFile(path, content, 0o644)
		},
		"lost":                os.Remove,
		"lost with its epoch": func(path string) error { return os.RemoveAll(filepath.Dir(path)) },
		"truncated":           func(path string) error { return os.Truncate(path, 6000) },
		"empty":               func(path string) error { return os.Truncate(path, 0) },
		"foreign":             func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("no database "), 1000), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := interruptedStudy(t)
			try(t, damage(database(t, dir)))
			before, epochs := namesIn(t, filepath.Join(dir, snapshotDir)), namesIn(t, dir)
			for range 2 {
				_, _, err := Open(context.Background(), dir, llama, Options{})
				wantUnusable(t, err, "open study llama70b", dir, fence.Database, "snap/0000", "with 1 trial and 1 probe", "a later commit would be lost", "--from-snapshot")
			}
			if now := namesIn(t, filepath.Join(dir, snapshotDir)); !slices.Equal(now, before) {
				t.Errorf("the snapshots are %v, want %v as before", now, before)
			}
			if now := namesIn(t, dir); !slices.Equal(now, epochs) {
				t.Errorf("the directory has %v, want %v as before", now, epochs)
			}
			s, resumed, err := Open(context.Background(), dir, llama, Options{FromSnapshot: true})
			try(t, err)
			study, err := s.Study()
			try(t, err)
			var events int
			try(t, s.db.QueryRow(`SELECT count(*) FROM events WHERE kind='restored' AND text LIKE 'from snap/%'`).Scan(&events))
			if !resumed || len(study.Trials) != 1 || study.Trials[0].State != Done || events != 1 {
				t.Errorf("Open from the snapshot = %+v, resumed %t, with %d events", study, resumed, events)
			}
			try(t, s.Begin(aTrial(1)), s.Close())
			open(t, dir)
		})
	}
}

// Open refuses an undamaged database that lacks acknowledged commits.
func TestOlderDatabase(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Close())
	old, err := os.ReadFile(database(t, dir))
	try(t, err)
	s = open(t, dir)
	try(t, s.Record(0, aProbe(0, 2)), s.Close())
	try(t, os.WriteFile(database(t, dir), old, 0o644))
	_, _, err = Open(context.Background(), dir, llama, Options{})
	wantUnusable(t, err, "the disk lost what it had stored: of 4 commits only 2 are left")
	if !errors.Is(err, fence.ErrLost) {
		t.Errorf("%v does not wrap ErrLost", err)
	}
}

// Open refuses the database of another study with the same name, whether it has more commits or fewer.
func TestDatabaseOfAnotherStudy(t *testing.T) {
	for _, trials := range []int{5, 0} {
		dir, other := interruptedStudy(t), t.TempDir()
		s := open(t, other)
		for n := range trials {
			try(t, s.Begin(aTrial(n)), s.Finish(n, aResult(2)))
		}
		try(t, s.Close())
		foreign, err := os.ReadFile(database(t, other))
		try(t, err, os.WriteFile(database(t, dir), foreign, 0o644))
		_, _, err = Open(context.Background(), dir, llama, Options{})
		wantUnusable(t, err, "it holds another study than the published one", "with 1 trial and 1 probe", "--from-snapshot")
		s, _, err = Open(context.Background(), dir, llama, Options{FromSnapshot: true})
		try(t, err)
		study, err := s.Study()
		if try(t, err, s.Close()); len(study.Trials) != 1 {
			t.Errorf("from the snapshot the study has %d trials, want 1", len(study.Trials))
		}
	}
}

// A study of schema 1 with an unfinished trial is resumed in the newest schema. Its old database, which is in the
// study's directory itself, stays unchanged.
func TestResumeSchema1(t *testing.T) {
	dir := t.TempDir()
	first := filepath.Join(dir, fence.Database)
	db, err := openFile(first, liveOptions)
	try(t, err)
	_, err = db.Exec(migrations[0] + `PRAGMA user_version=1;
		INSERT INTO studies VALUES ('id', 'llama70b', '18446744073709551615', 'name: llama70b', '{"model":"llama-70b-fp8","vllm":"0.14.1"}', 'stopped', '',
			'2026-03-01T12:00:00.000000000Z', '2026-03-01T12:00:00.000000000Z');
		INSERT INTO trials (number, origin, point, args, state, began) VALUES (0, 'default', '{}', '[]', 'running', '2026-03-01T12:00:00.000000000Z');`)
	try(t, err, db.Close())
	was, err := os.ReadFile(first)
	try(t, err)
	s, resumed, err := Open(context.Background(), dir, llama, Options{})
	try(t, err)
	study, err := s.Study()
	try(t, err)
	if !resumed || len(study.Trials) != 1 || study.Trials[0].Origin != Default || study.ID != "id" {
		t.Errorf("Open = %+v, resumed %t", study, resumed)
	}
	try(t, s.Record(0, aProbe(0, 2)), s.Close())
	is, err := os.ReadFile(first)
	try(t, err)
	if !bytes.Equal(was, is) {
		t.Error("the database of schema 1 has changed")
	}
}

// A copy of a study's directory can be resumed, even if the study's owner was killed.
func TestResumeACopy(t *testing.T) {
	dir := interruptedStudy(t)
	copied := filepath.Join(t.TempDir(), "elsewhere")
	try(t, os.CopyFS(copied, os.DirFS(dir)))
	s, resumed, err := Open(context.Background(), copied, llama, Options{})
	try(t, err)
	study, err := s.Study()
	try(t, err, s.Close())
	if !resumed || len(study.Trials) != 2 {
		t.Errorf("the copy is resumed: %t, with %d trials, want 2", resumed, len(study.Trials))
	}
}

// If the newest snapshot is damaged or missing, readers get the one before it, and Behind says why.
func TestReadAnOlderSnapshot(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for n := range 4 {
		try(t, s.Begin(aTrial(n)), s.Finish(n, aResult(2)))
	}
	all, err := snapshots(dir)
	try(t, err)
	try(t, os.Truncate(filepath.Join(dir, all[0].file()), 5000))
	study, err := ReadSnapshot(dir)
	try(t, err)
	if len(study.Trials) != 3 || !strings.Contains(study.Behind, all[0].file()) || study.Commits >= all[0].commits {
		t.Errorf("ReadSnapshot has %d trials and %d commits, want the 3 trials of the snapshot before; Behind = %q", len(study.Trials), study.Commits, study.Behind)
	}
	try(t, os.Remove(filepath.Join(dir, all[0].file())), os.WriteFile(filepath.Join(dir, currentFile), []byte(all[0].file()+"\n"), 0o644))
	again, err := ReadSnapshot(dir)
	try(t, err, errorOf(Export(t.Context(), dir, filepath.Join(t.TempDir(), "one.db"))))
	if len(again.Trials) != 3 {
		t.Errorf("ReadSnapshot has %d trials, want the 3 of the snapshot before", len(again.Trials))
	}
}

// obsoleteSnapshots keeps the base and the delta from which a new base is being written.
func TestObsolete(t *testing.T) {
	base := snapshot{1, 10, -1}
	all := []snapshot{base}
	for commits := range int64(8) {
		all = append(all, snapshot{1, 11 + commits, 10})
	}
	source, done := all[2], snapshot{1, 30, -1}
	gone := obsoleteSnapshots(slices.Clone(all), source)
	if slices.Contains(gone, source) || slices.Contains(gone, base) || len(gone) != 4 {
		t.Errorf("obsoleteSnapshots(%v) = %v, want 4 without the base and the source", all, gone)
	}
	if gone := obsoleteSnapshots(append(slices.Clone(all), done), snapshot{}); slices.Contains(gone, done) || slices.Contains(gone, base) {
		t.Errorf("obsolete with a new base = %v, want neither base", gone)
	}
}

// An Open that is refused changes no file.
func TestRefusedOpenChangesNothing(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Finish(0, aResult(2)), s.Close())
	files := pathsIn(t, dir)
	other, changed := llama, llama
	other.Name, changed.World = "other", map[string]string{"model": "another"}
	for range 3 {
		_, _, err := Open(context.Background(), dir, other, Options{AcceptDrift: true})
		wantError(t, err, `the directory holds the study "llama70b", not "other"`)
		_, _, err = Open(context.Background(), dir, changed, Options{})
		wantError(t, err, "model: llama-70b-fp8 → another", "--accept-drift")
	}
	if now := pathsIn(t, dir); !slices.Equal(now, files) {
		t.Errorf("the files are %v, want %v as before", now, files)
	}
}

// Open refuses a database and slots that are older than the newest snapshot.
func TestOlderDatabaseAndSlots(t *testing.T) {
	dir, backup := t.TempDir(), t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Close())
	try(t, os.CopyFS(backup, os.DirFS(dir)))
	s = open(t, dir)
	last := s.lease.Dir()
	try(t, s.Record(0, aProbe(1, 2.5)), s.Close())

	try(t, os.RemoveAll(filepath.Join(dir, last)), os.RemoveAll(filepath.Join(dir, fence.SlotDir)))
	try(t, os.CopyFS(filepath.Join(dir, fence.SlotDir), os.DirFS(filepath.Join(backup, fence.SlotDir))))
	for range 2 {
		_, _, err := Open(t.Context(), dir, llama, Options{})
		wantUnusable(t, err, "the disk lost what it had stored", "with 1 trial and 2 probes; nothing was stored after it", "--from-snapshot")
	}
	s, _, err := Open(t.Context(), dir, llama, Options{FromSnapshot: true})
	try(t, err)
	study, err := s.Study()
	try(t, err, s.Close())
	if len(study.Trials[0].Probes) != 2 {
		t.Errorf("from the snapshot trial 0 has %d probes, want 2", len(study.Trials[0].Probes))
	}
}

// A header with an impossible schema version counts as damage. The next run publishes the study again from its
// database.
func TestImpossibleSchema(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	for n := range 4 {
		try(t, s.Begin(aTrial(n)), s.Finish(n, aResult(2)))
	}
	try(t, s.Close())
	all, err := snapshots(dir)
	try(t, err)
	for _, n := range all {
		file, err := os.OpenFile(filepath.Join(dir, n.baseSnapshot().file()), os.O_WRONLY, 0)
		try(t, err)
		_, err = file.WriteAt([]byte{0xff}, 60) // the first byte of user_version (SQLite's file format, 1.3)
		try(t, err, file.Close())
	}
	_, err = ReadSnapshot(dir)
	wantUnusable(t, err, "it is damaged: its header has a wrong schema version, -")
	elsewhere := filepath.Join(t.TempDir(), "one.db")
	try(t, copyFile(t.Context(), filepath.Join(dir, all[0].baseSnapshot().file()), elsewhere))
	_, err = ReadFile(elsewhere)
	wantUnusable(t, err, "it is damaged: its header has a wrong schema version, -")
	try(t, open(t, dir).Close())
	study, err := ReadSnapshot(dir)
	try(t, err)
	if len(study.Trials) != 4 {
		t.Errorf("the study has %d trials, want 4", len(study.Trials))
	}
}

// Open refuses a database of another program in a study's place.
func TestDatabaseOfAnotherProgram(t *testing.T) {
	foreign := func(path string) {
		t.Helper()
		db, err := openFile(path, liveOptions)
		try(t, err)
		_, err = db.Exec(`CREATE TABLE accounts (x)`)
		try(t, err, db.Close())
	}
	fresh, used := t.TempDir(), interruptedStudy(t)
	foreign(filepath.Join(fresh, fence.Database))
	try(t, os.Remove(database(t, used)))
	foreign(database(t, used))
	for _, dir := range []string{fresh, used} {
		_, _, err := Open(t.Context(), dir, llama, Options{})
		wantUnusable(t, err, "it holds accounts of another program, and no study")
	}
	empty := t.TempDir()
	try(t, os.WriteFile(filepath.Join(empty, fence.Database), nil, 0o644))
	_, _, err := Open(t.Context(), empty, llama, Options{})
	wantUnusable(t, err, filepath.Join(empty, fence.Database)+" is empty")
	if got := namesIn(t, empty); len(got) != 1 {
		t.Errorf("the directory has %v, want the empty database alone", got)
	}
}

// A snapshot without a study counts as damaged.
func TestSnapshotWithoutAStudy(t *testing.T) {
	for name, change := range map[string]string{
		"no tables": "DROP TABLE studies; PRAGMA user_version=0; PRAGMA application_id=0",
		"no row":    "DELETE FROM studies",
	} {
		t.Run(name, func(t *testing.T) {
			dir, all := inOneBase(t)
			for _, n := range all[1:] {
				try(t, os.Remove(n.path(dir)))
			}
			inDatabase(t, all[0].path(dir), scratchOptions, func(db *sql.DB) { try(t, errorOf(db.Exec(change))) })
			wantUnusable(t, errorOf(ReadSummary(dir, func(Study) []int { return nil })), "it is damaged: no study is in it")
		})
	}
}
