package studies

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/mattn/go-sqlite3"
)

// A mark says where a snapshot ends. It has the number of commits, and the newest row of each table that only grows. A
// delta has the rows after the mark of its base. A trial's row can change later, so it has the number of the commit
// that changed it last.
type mark struct{ commits, probes, events, ledger int64 }

func markOf(db *sql.DB, commits int64) (mark, error) {
	m := mark{commits: commits}
	err := db.QueryRow(`SELECT (SELECT coalesce(max(rowid), 0) FROM probes), (SELECT coalesce(max(id), 0) FROM events), (SELECT coalesce(max(id), 0) FROM ledger)`).
		Scan(&m.probes, &m.events, &m.ledger)
	return m, err
}

// deltaTables lists the tables of a delta. The condition is SQL that selects the rows of the delta. A short table has
// no condition, because the delta has all its rows. The field firstSchema is the first schema that has the table; 0
// means that each schema with deltas has it.
var deltaTables = []struct {
	name, condition string
	firstSchema     int
}{
	{name: "studies"},
	{name: "world"},
	{name: "trials", condition: "WHERE changed > :commits"},
	{name: "results", condition: "WHERE trial IN (SELECT number FROM delta.trials)"},
	{name: "probes", condition: "WHERE rowid > :probes"},
	{name: "events", condition: "WHERE id > :events"},
	{name: "changes", condition: "WHERE event > :events", firstSchema: hasChanges},
	{name: "ledger", condition: "WHERE id > :ledger"},
	{name: "spent", firstSchema: hasSpent},
}

// join attaches a delta to the database of its base, and makes views that show both as one database. The views are
// temporary, because SQLite looks for a name without a schema among temporary names first.
func join(db *sql.DB, delta string, version int) error {
	views := ""
	for _, t := range deltaTables {
		base := "SELECT * FROM main." + t.name + " UNION ALL "
		switch {
		case version < t.firstSchema:
			continue
		case t.condition == "":
			base = ""
		case t.name == "trials":
			base = "SELECT * FROM main.trials WHERE number NOT IN (SELECT number FROM delta.trials) UNION ALL "
		}
		views += "CREATE TEMP VIEW " + t.name + " AS " + base + "SELECT * FROM delta." + t.name + ";"
	}
	if err := attach(db, delta); err != nil {
		return err
	}
	_, err := db.Exec(views + "PRAGMA query_only=1")
	return err
}

// merge adds a delta to a copy of its base. After an error the copy is useless.
func merge(db *sql.DB, delta string) error {
	version, err := schemaVersion(db)
	if err != nil {
		return err
	}
	statements := ""
	for _, t := range deltaTables {
		insert := "INSERT"
		switch {
		case version < t.firstSchema:
			continue
		case t.condition == "":
			statements += "DELETE FROM main." + t.name + ";"
		case t.name == "trials":
			insert = "INSERT OR REPLACE"
		}
		statements += insert + " INTO main." + t.name + " SELECT * FROM delta." + t.name + ";"
	}
	if err := attach(db, delta); err != nil {
		return err
	}
	if err := transact(db, func(tx *transaction) error { tx.exec(statements); return nil }); err != nil {
		return fmt.Errorf("merge the delta into its base: %w", err)
	}
	_, err = db.Exec(`DETACH delta`)
	return err
}

// attach attaches a delta to the database of its base.
func attach(db *sql.DB, delta string) error {
	name, err := uri(delta, publishedOptions)
	if err == nil {
		_, err = db.Exec(`ATTACH ? AS delta`, name)
	}
	if err != nil {
		return fmt.Errorf("attach the delta to its base: %w", err)
	}
	return nil
}

// deltaSince returns an SQLite file with the rows that a live database got after the mark of a base. It writes nothing
// to the disk.
func deltaSince(db *sql.DB, base mark) (content []byte, err error) {
	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if _, err := conn.ExecContext(ctx, `ATTACH ':memory:' AS delta`); err != nil {
		return nil, err
	}
	defer func() {
		_, detached := conn.ExecContext(ctx, `DETACH delta`)
		err = errors.Join(err, detached)
	}()
	ends := []any{
		sql.Named("commits", base.commits), sql.Named("probes", base.probes),
		sql.Named("events", base.events), sql.Named("ledger", base.ledger),
	}
	for _, t := range deltaTables {
		query := "CREATE TABLE delta." + t.name + " AS SELECT * FROM main." + t.name + " " + t.condition
		if _, err := conn.ExecContext(ctx, query, ends...); err != nil {
			return nil, fmt.Errorf("copy rows of %s: %w", t.name, err)
		}
	}
	err = conn.Raw(func(driver any) error {
		content, err = driver.(*sqlite3.SQLiteConn).Serialize("delta")
		return err
	})
	return content, err
}
