package studies

import (
	"bytes"
	"compress/gzip"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/trial"
)

// variedStudy makes a study with rows in every table: priors, a changed world, finished trials and a half-done trial.
// Its snapshots are a base and deltas.
func variedStudy(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	s := open(t, dir)
	elsewhere := aTrial(0)
	elsewhere.Probes, elsewhere.Result = append(elsewhere.Probes, aProbe(0, 3)), aResult(3)
	try(t, s.AddPriors([]Source{{Path: "results", Trials: []Trial{elsewhere, elsewhere}}}))
	random := rand.New(rand.NewPCG(1, 1))
	for n := range 3 {
		version, change := "0.14.1", Change{}
		if n == 2 {
			version, change = "0.15.0", VersionChange(Trial{Number: 1, Version: version}, "0.15.0")
		}
		p := aLongProbe(1, random)
		p.Verdict.Pass, p.Verdict.Headroom = false, -0.1
		s.Spend(trial.Spent{trial.Starting: time.Minute, trial.Windows: 2 * time.Minute})
		try(t, s.Begin(aTrial(n)), s.Served(n, version, change), s.Record(n, aProbe(0, 2)), s.Record(n, p), s.Finish(n, aResult(30)))
	}
	try(t, s.Begin(aTrial(3)), s.Record(3, aLongProbe(0, random)), s.Record(3, aProbe(1, 4)), s.SetState(Stopped, "interrupted"), s.Close())
	return dir
}

// inDatabase opens a database, calls the given function with it, and closes the database.
func inDatabase(t *testing.T, path, query string, do func(db *sql.DB)) {
	t.Helper()
	db, err := openFile(path, query)
	try(t, err)
	do(db)
	try(t, db.Close())
}

// A change of any value of any row is found, and the reader learns which row it is.
func TestEachChangedValueIsFound(t *testing.T) {
	t.Parallel()
	path := database(t, variedStudy(t))
	inDatabase(t, path, scratchOptions, func(db *sql.DB) {
		n := 0
		for _, of := range []*table{studiesTable, worldTable, trialsTable, resultsTable, probesTable, ledgerTable, priorsTable,
			eventsTable, changesTable, sourcesTable, spentTable} {
			columns := strings.Split("rowid, "+of.list(long), ", ")
			var all [][]any
			try(t, scanRows(db, "SELECT "+strings.Join(columns, ", ")+" FROM "+of.name, nil, func(values []any) error {
				all = append(all, slices.Clone(values))
				return nil
			}))
			if len(all) == 0 {
				t.Errorf("table %s has no rows", of.name)
			}
			for _, row := range all {
				for i, column := range columns[1:] {
					changed, ok := otherDigit(row[i+1])
					if !ok {
						continue
					}
					n++
					what := fmt.Sprintf("%s.%s of row %v, from %.40v to %.40v", of.name, column, row[0], row[i+1], changed)
					wantFound(t, db, what, "UPDATE "+of.name+" SET "+column+"=? WHERE rowid=?", changed, row[0])
				}
			}
		}
		if n < 300 {
			t.Errorf("%d values were changed, want at least 300", n)
		}
	})
}

// otherDigit returns another value of the same type. In a text with a digit it changes the first digit: 30 becomes 90.
func otherDigit(v any) (any, bool) {
	switch v := v.(type) {
	case int64:
		return v + 6, true
	case float64:
		if v == 0 {
			return 9.0, true
		}
		return 3 * v, true
	case string:
		if i := strings.IndexAny(v, "0123456789"); i >= 0 {
			return v[:i] + string('0'+(v[i]-'0'+6)%10) + v[i+1:], true
		}
		return v + "x", true
	case []byte:
		b := slices.Clone(v)
		b[len(b)/2] ^= 1
		return b, true
	}
	return nil, false
}

// wantFound changes a database, expects that each reader calls the database damaged, and undoes the change.
func wantFound(t *testing.T, db *sql.DB, what, change string, args ...any) {
	t.Helper()
	_, err := db.Exec("PRAGMA foreign_keys=0; SAVEPOINT before")
	try(t, err)
	if _, err = db.Exec(change, args...); err == nil {
		_, err = verifyAll(db)
		if !errors.Is(err, errDamaged) {
			t.Errorf("%s: verifyAll = %v, want damaged", what, err)
		}
		for _, columns := range []probeColumns{short, long} {
			_, err := summarize(db, func(s Study) (all []int) {
				for _, t := range s.Trials {
					all = append(all, t.Number)
				}
				return all
			}, columns)
			notRead := strings.HasPrefix(what, "ledger.") || columns == short && (strings.Contains(what, ".series") || strings.Contains(what, ".sketches"))
			if !errors.Is(err, errDamaged) && !notRead { // notRead is true if summaries do not read this column
				t.Errorf("%s: summarize = %v, want damaged", what, err)
			}
		}
	} else if !strings.Contains(err.Error(), "UNIQUE constraint") {
		t.Errorf("%s: %v", what, err)
	}
	_, err = db.Exec("ROLLBACK TO before; RELEASE before")
	try(t, err)
}

// A removed, moved or doubled row does not change the checksums of the rows that are left. The sums of the tables show
// the damage.
func TestMissingAndMovedRowsAreFound(t *testing.T) {
	t.Parallel()
	inDatabase(t, database(t, variedStudy(t)), scratchOptions, func(db *sql.DB) {
		for what, change := range map[string]string{
			"the last event is lost":                      `DELETE FROM events WHERE id=(SELECT max(id) FROM events)`,
			"an event in the middle is lost":              `DELETE FROM events WHERE id=3`,
			"an event has another place":                  `UPDATE events SET id=100 WHERE id=2`,
			"the last trial is lost":                      `DELETE FROM probes WHERE trial=3; DELETE FROM trials WHERE number=3`,
			"the last probe of a trial is lost":           `DELETE FROM probes WHERE trial=1 AND seq=1`,
			"the last probe of a half-done trial is lost": `DELETE FROM probes WHERE trial=3 AND seq=1`,
			"a result is lost":                            `DELETE FROM results WHERE trial=2`,
			"a probe belongs to another trial":            `UPDATE probes SET trial=3, seq=5 WHERE trial=1 AND seq=1`,
			"a prior is there twice":                      `INSERT INTO priors SELECT 10, source, trial, sum FROM priors WHERE id=1`,
			"a fact of the world is lost":                 `DELETE FROM world WHERE key='model'`,
			"the time of a part is lost":                  `DELETE FROM spent WHERE what='window'`,
			"ledger.trial of a lost line":                 `DELETE FROM ledger WHERE id=2`,
			"two trials have changed places":              `UPDATE trials SET number=9 WHERE number=0; UPDATE trials SET number=0 WHERE number=1; UPDATE trials SET number=1 WHERE number=9`,
			"the sums of the tables are lost":             `UPDATE studies SET holds=''`,
		} {
			wantFound(t, db, what, change)
		}
	})
}

// A value that was damaged before it got a checksum gives an error in plain words.
func TestMeaninglessValues(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]string{
		"the study's own row": `UPDATE studies SET created='yesterday'`,
		"event 1 ":            `UPDATE events SET time='2026-13-01' WHERE id=1`,
		"trial 0 ":            `UPDATE trials SET point='{' WHERE number=0`,
		"the result of trial": `UPDATE results SET result='[' WHERE trial=0`,
		"trial 0, probe 1 ":   `UPDATE probes SET probe='{"rate":"fast"}' WHERE trial=0 AND seq=1`,
	} {
		path := filepath.Join(t.TempDir(), "old.db")
		db := oldDatabase(t, hasSums-1, path)
		_, err := db.Exec(change)
		try(t, err, db.Close())
		_, err = ReadFile(path)
		wantUnusable(t, err, "read "+path, "it is damaged: "+what, "cannot be read: it has an invalid value")
	}
}

// expand stops at a limit, because a damaged column may expand to any length.
func TestExpandingIsBounded(t *testing.T) {
	realtime.Only(t, "expands 64 MiB")
	t.Parallel()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	try(t, err)
	_, err = w.Write(make([]byte, 1<<20))
	try(t, err, w.Close())
	tooLong := bytes.Repeat(b.Bytes(), maxExpanded/(1<<20)+1) // a gzip file may have several members
	wantError(t, expand(tooLong, new(string)), "it expands to more than 64 MiB")
}

// TestDamageIsFound overwrites bytes of a study's databases and snapshots. A reader must then get the newest study, or
// an older one with a warning, or an error that says damaged. A run must go on, from a snapshot if its database is
// useless.
func TestDamageIsFound(t *testing.T) {
	t.Parallel()
	dir := variedStudy(t)
	all, err := snapshots(dir)
	try(t, err)
	var published []Study
	for _, n := range all {
		study, err := n.read(dir, load)
		try(t, err)
		published = append(published, study)
	}
	random := rand.New(rand.NewPCG(19, 1))
	seen := map[string]int{}
	for i := range 24 {
		damaged := filepath.Join(t.TempDir(), "llama70b")
		try(t, os.CopyFS(damaged, os.DirFS(dir)))
		path := database(t, damaged)
		if i%2 == 1 {
			path = filepath.Join(damaged, all[0].baseSnapshot().file())
		}
		if i%4 == 3 {
			path = filepath.Join(damaged, all[i/4%len(all)].file())
		}
		content, err := os.ReadFile(path)
		try(t, err)
		at, n := random.IntN(len(content)), []int{1, 64}[i/2%2]
		for j := range min(n, len(content)-at) {
			content[at+j] ^= byte(1 + random.IntN(255))
		}
		try(t, os.WriteFile(path, content, 0o644))
		what := fmt.Sprintf("%d bytes of %s at %d", n, strings.TrimPrefix(path, damaged), at)

		study, err := ReadSnapshot(damaged)
		seen[wantTrue(t, what, study, err, published)]++
		study, err = readThroughEach(damaged)
		wantTrue(t, what+", read one by one", study, err, published)
		out := filepath.Join(t.TempDir(), "out.db")
		if study, err = Export(t.Context(), damaged, out); err == nil {
			behind := study.Behind
			study, err = ReadFile(out)
			study.Behind = behind
		}
		wantTrue(t, what+", exported", study, err, published)
		seen[wantGoesOn(t, what, damaged, published)]++
	}
	for _, want := range []string{"whole", "behind", "went on", "from a snapshot"} {
		if seen[want] == 0 {
			t.Errorf("no case was %q: %v", want, seen)
		}
	}
	t.Log(seen)
}

// readThroughEach reads a whole study with ReadEach.
func readThroughEach(dir string) (study Study, err error) {
	var trials []Trial
	study, err = ReadEach(dir, true, func(_ Study, each iter.Seq2[Trial, error]) error {
		for one, err := range each {
			if err != nil {
				return err
			}
			trials = append(trials, one)
		}
		return nil
	})
	study.Trials = trials
	return study, err
}

// wantTrue expects the newest published study, or an older one with a warning, or an error in the tuner's own words.
func wantTrue(t *testing.T, what string, study Study, err error, published []Study) (is string) {
	t.Helper()
	if err != nil {
		wantUnusable(t, err, "it is damaged", "`tuner run` publishes the study again")
		for _, raw := range []string{"parsing", "invalid character", "JSON", "SQL", "malformed", "no such", "constraint", "***"} {
			if strings.Contains(err.Error(), raw) {
				t.Errorf("%s: %v", what, err)
			}
		}
		return "damaged"
	}
	behind := study.Behind
	study.Behind = ""
	i := slices.IndexFunc(published, func(p Study) bool { return reflect.DeepEqual(p, study) })
	if i < 0 || i > 0 && behind == "" {
		t.Errorf("%s: the study is\n%+v\nwhich is snapshot %d, and Behind is %q", what, study, i, behind)
	}
	if behind != "" {
		return "behind"
	}
	return "whole"
}

// wantGoesOn expects a run to go on with the whole study, or to name the damage and go on from a snapshot.
func wantGoesOn(t *testing.T, what, dir string, published []Study) (did string) {
	t.Helper()
	did = "went on"
	s, _, err := Open(context.Background(), dir, llama, Options{})
	if err != nil {
		wantUnusable(t, err, "it is damaged", "with 4 trials and 8 probes; nothing was stored after it", "--from-snapshot")
		did = "from a snapshot"
		s, _, err = Open(context.Background(), dir, llama, Options{FromSnapshot: true})
	}
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return did
	}
	study, err := s.Study()
	try(t, err, s.Begin(aTrial(3)), s.Record(3, aProbe(2, 5)), s.Close())
	if !reflect.DeepEqual(study.Trials, published[0].Trials) || !reflect.DeepEqual(study.Prior, published[0].Prior) || !reflect.DeepEqual(study.World, published[0].World) {
		t.Errorf("%s: the resumed study is %+v", what, study)
	}
	return did
}

// A trial's row is checked before it is changed, so that a damaged row gets no new checksum.
func TestDamageGetsNoChecksum(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	try(t, s.Begin(aTrial(0)), s.Record(0, aProbe(0, 2)))
	_, err := s.db.Exec(`UPDATE trials SET point='{"max-num-seqs":"928"}'`)
	try(t, err)
	err = s.Finish(0, aResult(2))
	wantError(t, err, "finish trial 0", "trial 0 was changed")
	_, err = s.Study()
	wantUnusable(t, err, "it is damaged: trial 0 was changed")
}

// A snapshot whose file has another snapshot's name is damaged.
func TestASnapshotUnderAnotherName(t *testing.T) {
	t.Parallel()
	dir := variedStudy(t)
	all, err := snapshots(dir)
	try(t, err)
	oldest, later := all[len(all)-1], all[0]
	later.base, later.commits = -1, later.commits+1
	try(t, copyFile(t.Context(), filepath.Join(dir, oldest.baseSnapshot().file()), filepath.Join(dir, later.file())))
	study, err := ReadSnapshot(dir)
	if try(t, err); len(study.Trials) != 4 || !strings.Contains(study.Behind, fmt.Sprintf("and its name says %d", later.commits)) {
		t.Errorf("ReadSnapshot has %d trials and Behind %q, want 4 and the wrong name", len(study.Trials), study.Behind)
	}
}
