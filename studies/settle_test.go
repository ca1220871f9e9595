package studies

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"vllmtuner/studies/fence"
)

// database is the live database of the study in a directory, which nobody owns.
func database(t *testing.T, dir string) string {
	t.Helper()
	folder, err := fence.OpenFolder(dir, fence.CertainLocks)
	try(t, err)
	at, err := fence.Look(folder)
	try(t, err, folder.Close())
	return filepath.Join(dir, fence.EpochDir(at.Slot.Epoch), fence.Database)
}

// left makes a study with a finished trial and a probe of the next, of which the newest snapshot knows only the former.
func left(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s, _, err := Open(context.Background(), dir, llama, Options{})
	try(t, err, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)), s.Finish(0, aResult(2)))
	s.mu.Lock() // nothing more is published
	defer s.mu.Unlock()
	try(t, s.commit("begin trial 1", func(tx *sql.Tx) error {
		return execute(tx, `INSERT INTO trials (number, origin, point, args, state, began) VALUES (1, 'sampler', '{}', '[]', 'running', ?)`, formatTime(time.Now()))
	}), s.release())
	close(s.stop)
	return dir
}

func names(t *testing.T, dir string) (all []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	try(t, err)
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

// A damaged or lost database is not repaired without a word: what there is instead is offered, and what would be lost is said.
func TestADamagedStudyIsNotRepairedByItself(t *testing.T) {
	for name, harm := range map[string]func(path string) error{
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
		"lost":      os.Remove,
		"truncated": func(path string) error { return os.Truncate(path, 6000) },
		"empty":     func(path string) error { return os.Truncate(path, 0) },
		"foreign":   func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("no database "), 1000), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := left(t)
			try(t, harm(database(t, dir)))
			before, epochs := names(t, filepath.Join(dir, snapshotDir)), names(t, dir)
			for range 2 {
				_, _, err := Open(context.Background(), dir, llama, Options{})
				wantError(t, err, "open study llama70b", dir, fence.Database, "snap/0000", "with 1 trials and 1 probes", "a later commit would be lost", "--from-snapshot")
			}
			if now := names(t, filepath.Join(dir, snapshotDir)); !slices.Equal(now, before) {
				t.Errorf("the snapshots were %v and are %v", before, now)
			}
			if now := names(t, dir); !slices.Equal(now, epochs) {
				t.Errorf("the directory had %v and has %v", epochs, now)
			}
			s, resumed, err := Open(context.Background(), dir, llama, Options{FromSnapshot: true})
			try(t, err)
			study, err := s.Study()
			try(t, err)
			var events int
			try(t, s.db.QueryRow(`SELECT count(*) FROM events WHERE kind='restored' AND text LIKE 'from snap/%'`).Scan(&events))
			if !resumed || len(study.Trials) != 1 || study.Trials[0].State != Done || events != 1 {
				t.Errorf("from the snapshot: resumed %t, %+v, %d events", resumed, study, events)
			}
			try(t, s.Begin(aTrial(1)), s.Close())
			open(t, dir)
		})
	}
}

// A database that is whole but older than what was acknowledged is not taken for the study.
func TestAnOlderDatabaseIsNotTheStudy(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	try(t, s.Begin(aTrial(0)), s.Close())
	old, err := os.ReadFile(database(t, dir))
	try(t, err)
	s = open(t, dir)
	try(t, s.Record(0, aProbe(0, 2)), s.Close())
	try(t, os.WriteFile(database(t, dir), old, 0o644))
	_, _, err = Open(context.Background(), dir, llama, Options{})
	wantError(t, err, "the disk lost what it had stored: of 4 commits 2 are left")
	if !errors.Is(err, fence.ErrLost) {
		t.Errorf("%v does not wrap ErrLost", err)
	}
}

// A study of the first schema, which lay in the directory itself, goes on in the newest; its database stays.
func TestAStudyOfTheFirstSchemaGoesOn(t *testing.T) {
	dir := t.TempDir()
	first := filepath.Join(dir, fence.Database)
	db, err := openFile(first, settings)
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
		t.Errorf("resumed %t: %+v", resumed, study)
	}
	try(t, s.Record(0, aProbe(0, 2)), s.Close())
	is, err := os.ReadFile(first)
	try(t, err)
	if !bytes.Equal(was, is) {
		t.Error("the database of the first schema was changed")
	}
}

// A study's directory can be copied to another place, also when its owner was killed.
func TestAStudyCanBeCopied(t *testing.T) {
	dir := left(t)
	copied := filepath.Join(t.TempDir(), "elsewhere")
	try(t, os.CopyFS(copied, os.DirFS(dir)))
	s, resumed, err := Open(context.Background(), copied, llama, Options{})
	try(t, err)
	study, err := s.Study()
	try(t, err, s.Close())
	if !resumed || len(study.Trials) != 2 {
		t.Errorf("resumed %t with %d trials, want 2", resumed, len(study.Trials))
	}
}
