package studies

import (
	"database/sql"
	"errors"
	"os"

	"github.com/mattn/go-sqlite3"
)

// verifyAll checks every row of a database and the sums of all tables. It returns the number of commits.
func verifyAll(db *sql.DB) (commits int64, err error) {
	r, err := readSummaries(db)
	if errors.Is(err, sql.ErrNoRows) { // there is no study: the first run was killed while it began
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if err := r.readTable(ledgerTable, func(row) error { return nil }); err != nil {
		return 0, err
	}
	return r.study.Commits, r.verifyParts()
}

// verifyParts checks results and probes row by row, because together they may not fit into the memory.
func (r *loader) verifyParts() error {
	found := map[int]rowSum{}
	for _, t := range []*table{resultsTable, probesTable} {
		var all rowSum
		err := t.read(r.db, long, "", nil, func(one row) error {
			number := int(one.integer("trial"))
			found[number], all = found[number].plus(one.sum()), all.plus(one.sum())
			if t == probesTable {
				_, err := long.rowIn(one)
				return err
			}
			return nil
		})
		if err != nil {
			return err
		}
		if err := r.sums.check(t, all); err != nil {
			return err
		}
	}
	return r.checkFinished(r.study.Trials, found)
}

// explainSQLite turns errors that a damaged or foreign file causes in SQLite into words for people. It returns any
// other error unchanged.
func explainSQLite(err error) error {
	of, ok := errors.AsType[sqlite3.Error](err)
	if !ok {
		return err
	}
	switch of.Code {
	case sqlite3.ErrCorrupt:
		return damagedf("its pages do not fit together")
	case sqlite3.ErrNotADB:
		return damagedf("it is not a database")
	case sqlite3.ErrError, sqlite3.ErrConstraint, sqlite3.ErrMismatch, sqlite3.ErrSchema:
		return damagedf("its tables are not a study's tables")
	case sqlite3.ErrTooBig, sqlite3.ErrNomem:
		return damagedf("a value in it has an impossible length")
	}
	return err
}

// explainFile does what explainSQLite does. It also explains why SQLite cannot open one of the files. A missing file
// does not count as damaged, because it may have been removed after the reader saw it.
func explainFile(err error, paths ...string) error {
	of, ok := errors.AsType[sqlite3.Error](err)
	if !ok || of.Code != sqlite3.ErrCantOpen {
		return explainSQLite(err)
	}
	for _, path := range paths {
		f, opened := os.Open(path)
		if opened != nil {
			return opened
		}
		if closed := f.Close(); closed != nil {
			return closed
		}
	}
	return damagedf("it is not a study's database")
}
