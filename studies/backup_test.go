package studies

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"vllmtuner/studies/fence"
)

// beginHalf leaves half of a transaction in a database, with the journal that rolls it back.
func beginHalf(t *testing.T, path string) {
	t.Helper()
	db, err := openFile(path, liveOptions)
	try(t, err)
	_, err = db.Exec("PRAGMA cache_size=1")
	try(t, err)
	tx, err := db.Begin()
	try(t, err)
	_, err = tx.Exec("UPDATE probes SET probe = probe || hex(randomblob(5000))")
	try(t, err)
	var half [2][]byte
	names := [2]string{path, path + "-journal"}
	for i, name := range names {
		half[i], err = os.ReadFile(name)
		try(t, err)
	}
	try(t, tx.Rollback(), db.Close())
	for i, name := range names {
		try(t, os.WriteFile(name, half[i], 0o644))
	}
	if hot, err := isHot(path); err != nil || !hot {
		t.Fatalf("isHot = %t, %v; want a transaction to roll back", hot, err)
	}
}

// If the database and all snapshots are damaged, the error names the copy in an older epoch. The commands in the error
// resume the study.
func TestTheErrorOffersAnOlderEpoch(t *testing.T) {
	for name, hot := range map[string]bool{"without a transaction": false, "with half a transaction": true} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			dir := filepath.Join(root, "our studies", "llama70b")
			s := open(t, dir)
			try(t, s.Begin(aTrial(0)))
			for seq := range 10 {
				try(t, s.Record(0, aProbe(seq, 2)))
			}
			try(t, s.Close())
			older := database(t, dir)
			s = open(t, dir)
			try(t, s.Record(0, aProbe(10, 2)), s.Finish(0, aResult(2)), s.Close())
			if hot {
				beginHalf(t, older)
			}
			damage := []string{database(t, dir)}
			snaps, err := snapshots(dir)
			try(t, err)
			for _, n := range snaps {
				damage = append(damage, filepath.Join(dir, n.file()))
			}
			for _, path := range damage {
				try(t, os.WriteFile(path, []byte(strings.Repeat("no database ", 1000)), 0o644))
			}
			was, err := os.ReadFile(older)
			try(t, err)
			var said string
			for _, options := range []Options{{}, {FromSnapshot: true}} {
				_, _, err := Open(t.Context(), dir, llama, options)
				wantUnusable(t, err, "there is no snapshot to go on from", older+" is undamaged", "with 1 trial and 12 commits; 3 later commits would be lost", " && tuner run FILE --root OTHER")
				said = err.Error()
			}
			if is, err := os.ReadFile(older); err != nil || string(is) != string(was) {
				t.Errorf("the older epoch's database has changed, %v", err)
			}
			_, command, _ := strings.Cut(said, "in another root directory: ")
			command, _, _ = strings.Cut(command, " && tuner run")
			other := t.TempDir()
			out, err := exec.CommandContext(t.Context(), "sh", "-c", strings.ReplaceAll(command, "OTHER", other)).CombinedOutput()
			if err != nil {
				t.Fatalf("%s: %v, %s", command, err, out)
			}
			s, resumed, err := Open(t.Context(), filepath.Join(other, "llama70b"), llama, Options{})
			try(t, err)
			study, err := s.Study()
			try(t, err)
			if !resumed || len(study.Trials) != 1 || len(study.Trials[0].Probes) != 10 {
				t.Errorf("resumed %t with %+v, want one trial with 10 probes", resumed, study)
			}
			try(t, s.Record(0, aProbe(10, 2)), s.Close(), open(t, filepath.Join(other, "llama70b")).Close())
		})
	}
}

// If nothing is whole, the error says what the user can do.
func TestNothingIsWhole(t *testing.T) {
	dir := t.TempDir()
	try(t, open(t, dir).Close(), os.WriteFile(database(t, dir), []byte(strings.Repeat("no database ", 1000)), 0o644), os.RemoveAll(filepath.Join(dir, snapshotDir)))
	_, _, err := Open(t.Context(), dir, llama, Options{})
	wantUnusable(t, err, fence.Database, "there is no snapshot to go on from", "no undamaged copy in an older epoch: restore the study's directory from a backup")
}
