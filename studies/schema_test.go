package studies

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"vllmtuner/studies/fence"
	"vllmtuner/trial"
)

// oldDatabase makes a database of an older schema at a path. It has the rows of a small study, as a tuner of that
// schema wrote them.
func oldDatabase(t *testing.T, version int, path string) *sql.DB {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("testdata/schema-%d.sql", version))
	try(t, err)
	db, err := openFile(path, liveOptions)
	try(t, err)
	_, err = db.Exec(string(text))
	try(t, err)
	return db
}

// asWritten returns the trials of an older database, decoded from its JSON columns.
func asWritten(t *testing.T, db *sql.DB) (trials []Trial) {
	t.Helper()
	version, err := schemaVersion(db)
	try(t, err)
	result, long := "result", ", NULL, NULL"
	if version >= 3 { // since schema 3, results have a table of their own, and series and sketches have columns
		result, long = "(SELECT result FROM results WHERE trial=number)", ", series, sketches"
	}
	rows, err := db.Query(`SELECT number, origin, point, args, state, began, ended, ` + result + ` FROM trials ORDER BY number`)
	try(t, err)
	for rows.Next() {
		var one Trial
		var point, args, began, ended, result string
		try(t, rows.Scan(&one.Number, &one.Origin, &point, &args, &one.State, &began, &ended, &result))
		try(t, decode(point, &one.Point), decode(args, &one.Args), decode(result, &one.Result), parseTime(began, &one.Began), parseTime(ended, &one.Ended))
		one.Version = one.Result.Facts.Version
		trials = append(trials, one)
	}
	try(t, rows.Err(), rows.Close())
	rows, err = db.Query(`SELECT trial, probe` + long + ` FROM probes ORDER BY trial, seq`)
	try(t, err)
	for rows.Next() {
		var number int
		var row probeRow
		try(t, rows.Scan(&number, &row.figures, &row.series, &row.sketches))
		p, err := row.probe()
		try(t, err)
		trials[number].Probes = append(trials[number].Probes, p)
	}
	try(t, rows.Err(), rows.Close())
	return trials
}

// eventTexts returns the kind and text of each event of an older database.
func eventTexts(t *testing.T, db *sql.DB) (texts []string) {
	t.Helper()
	try(t, scanRows(db, `SELECT kind || ' ' || text FROM events ORDER BY id`, nil, func(values []any) error {
		texts = append(texts, values[0].(string))
		return nil
	}))
	return texts
}

// A study of each older schema can be read as a file and from a snapshot. It resumes in the newest schema with the
// same values, and the old database is kept.
func TestOlderSchemas(t *testing.T) {
	for version := 1; version < len(migrations); version++ {
		t.Run(fmt.Sprint(version), func(t *testing.T) {
			dir := t.TempDir()
			first := filepath.Join(dir, fence.Database)
			db := oldDatabase(t, version, first)
			want, events := asWritten(t, db), eventTexts(t, db)
			var commits int64 = 5
			if version >= hasSums { // since this version, a reader checks the number of commits in a snapshot's name
				try(t, db.QueryRow(`SELECT commits FROM studies`).Scan(&commits))
			}
			try(t, db.Close(), os.Mkdir(filepath.Join(dir, snapshotDir), 0o755), os.Mkdir(filepath.Join(dir, fence.SlotDir), 0o755),
				copyFile(t.Context(), first, filepath.Join(dir, snapshot{0, commits, -1}.file())))
			was, err := os.ReadFile(first)
			try(t, err)

			is, err := IsFile(first)
			try(t, err)
			read, err := ReadFile(first)
			try(t, err)
			study, err := ReadSnapshot(dir)
			try(t, err)
			if !is || !reflect.DeepEqual(read.Trials, want) || !reflect.DeepEqual(study.Trials, want) {
				t.Errorf("IsFile = %t, and ReadFile and ReadSnapshot have the trials\n%+v and\n%+v, want\n%+v", is, read.Trials, study.Trials, want)
			}
			cache := trial.Reset
			if version == 4 {
				cache = trial.Carried
			}
			if study.OldCache != cache {
				t.Errorf("OldCache = %q, want %q", study.OldCache, cache)
			}
			for i, e := range study.Events {
				if e.Kind+" "+e.Text() != events[i] || (e.Kind == Drift) != (len(e.Changes) > 0) {
					t.Errorf("event %d = %+v, want %q", i, e, events[i])
				}
			}
			if len(study.Events) != len(events) {
				t.Errorf("ReadSnapshot has %d events, want %d", len(study.Events), len(events))
			}
			s, resumed, err := Open(context.Background(), dir, New{Name: study.Name, Seed: study.Seed, File: study.File, World: study.World}, Options{})
			try(t, err)
			again, err := s.Study()
			try(t, err)
			if !resumed || !reflect.DeepEqual(again.Trials, want) || len(want) != 4 || len(want[0].Probes) < 3 || want[0].Probes[0].Measurement.Series == nil {
				t.Errorf("resumed %t, with the trials %+v", resumed, again.Trials)
			}
			checkColumns(t, s, want)
			try(t, s.Begin(aTrial(4)), s.Record(4, aLongProbe(0, rand.New(rand.NewPCG(1, 1)))), s.Close())

			if is, err := os.ReadFile(first); err != nil || !reflect.DeepEqual(is, was) {
				t.Errorf("the database of schema %d has changed, %v", version, err)
			}
			kept, err := openFile(filepath.Join(dir, backupDir, fmt.Sprintf("schema-%d.db", version)), publishedOptions)
			try(t, err)
			if of, err := schemaVersion(kept); err != nil || of != version || !reflect.DeepEqual(asWritten(t, kept), want) {
				t.Errorf("the backup has schema %d, %v, want %d with the same trials", of, err, version)
			}
			try(t, kept.Close())
		})
	}
}

// checkColumns checks that the columns that a migration has filled agree with the trials' results.
func checkColumns(t *testing.T, s *Store, want []Trial) {
	t.Helper()
	summary, err := s.Summary(func(Study) []int { return nil })
	try(t, err)
	var gpu float64
	for i, is := range summary.Trials {
		w := want[i]
		gpu += w.Result.GPUTime.Seconds()
		c, r := w.Result.Capacity, w.Result
		c.Why, c.Probes, c.Pieces, c.Steps = "", 0, nil, nil
		if got := is.Result; !reflect.DeepEqual(got.Capacity, c) || got.Class != r.Class || got.Cause != r.Cause || got.Evidence != r.Evidence || got.Outcome != r.Outcome ||
			got.GPUTime.Milliseconds() != r.GPUTime.Milliseconds() || got.Facts.Version != r.Facts.Version || got.Facts.StartUp != r.Facts.StartUp || got.Facts.Simulated != r.Facts.Simulated {
			t.Errorf("the columns of trial %d are\n%+v, want\n%+v", i, got, r)
		}
		wantNearest(t, s, w)
	}
	var booked float64
	try(t, s.db.QueryRow(`SELECT sum(gpu_seconds) FROM ledger`).Scan(&booked))
	if booked < gpu-0.001 || booked > gpu+0.001 {
		t.Errorf("the ledger has %g s of GPU time, want %g s as in the trials", booked, gpu)
	}
}

// wantNearest checks near_rps and near_headroom of a trial against all its failed probes.
func wantNearest(t *testing.T, s *Store, of Trial) {
	t.Helper()
	var rate, headroom sql.NullFloat64
	try(t, s.db.QueryRow(`SELECT near_rps, near_headroom FROM trials WHERE number=?`, of.Number).Scan(&rate, &headroom))
	failed := slices.DeleteFunc(slices.Clone(of.Probes), func(p trial.Probe) bool { return p.Verdict.Pass })
	if rate.Valid != (len(failed) > 0) || headroom.Valid != rate.Valid {
		t.Errorf("trial %d has %d failed probes, and the nearest is %v, %v", of.Number, len(failed), rate, headroom)
	}
	for _, p := range failed {
		if h := p.Verdict.Headroom; h > headroom.Float64 || h == headroom.Float64 && p.Rate < rate.Float64 {
			t.Errorf("trial %d: the nearest is %g at %g req/s, and %g at %g is nearer", of.Number, headroom.Float64, rate.Float64, h, p.Rate)
		}
	}
}

func TestOldCache(t *testing.T) {
	for text, want := range map[string]trial.Protocol{
		"": "", "protocol reset, prime rate 0 req/s": trial.Reset, "protocol steady, prime rate 1.5 req/s": trial.Steady,
		"protocol primed, prime rate 0 req/s": trial.Primed, "protocol of the workload, prime rate 0 req/s": trial.Carried,
	} {
		if got := oldCache(text); got != want {
			t.Errorf("oldCache(%q) = %q, want %q", text, got, want)
		}
	}
}
