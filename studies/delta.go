package studies

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/mattn/go-sqlite3"
)

// A mark says where a base snapshot ends: its number of commits, and the newest rows of the tables that only grow. A
// delta has the rows after it. Trials can change later, so each trial has the number of the commit that changed it
// last.
type mark struct{ commits, probes, events, ledger int64 }

func markOf(db *sql.DB, commits int64) (mark, error) {
	m := mark{commits: commits}
	err := db.QueryRow(`SELECT (SELECT coalesce(max(rowid), 0) FROM probes), (SELECT coalesce(max(id), 0) FROM events), (SELECT coalesce(max(id), 0) FROM ledger)`).
		Scan(&m.probes, &m.events, &m.ledger)
	return m, err
}

// deltaTables are the tables of a delta. rows is the SQL condition that selects the rows of the delta. Short tables
// have no condition: the delta has all their rows.
var deltaTables = []struct{ name, rows string }{
	{"studies", ""},
	{"world", ""},
	{"trials", "WHERE changed > :commits"},
	{"results", "WHERE trial IN (SELECT number FROM delta.trials)"},
	{"probes", "WHERE rowid > :probes"},
	{"events", "WHERE id > :events"},
	{"changes", "WHERE event > :events"}, // since schema 5
	{"ledger", "WHERE id > :ledger"},
}

// join attaches a delta to the database of its base, and makes views that show both as one database. The views are
// temporary, because SQLite looks for a name without a schema among temporary names first.
func join(db *sql.DB, delta string, version int) error {
	views := ""
	for _, t := range deltaTables {
		base := "SELECT * FROM main." + t.name + " UNION ALL "
		switch {
		case t.name == "changes" && version < hasChanges:
			continue
		case t.rows == "":
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
		case t.name == "changes" && version < hasChanges:
			continue
		case t.rows == "":
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
	name, err := uri(delta, published)
	if err == nil {
		_, err = db.Exec(`ATTACH ? AS delta`, name)
	}
	if err != nil {
		return fmt.Errorf("attach the delta to its base: %w", err)
	}
	return nil
}

// deltaSince returns an SQLite file with those rows of a live database that came after a base's mark. It writes nothing
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
		query := "CREATE TABLE delta." + t.name + " AS SELECT * FROM main." + t.name + " " + t.rows
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
