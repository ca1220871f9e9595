package studies

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/mattn/go-sqlite3"
)

// A mark is the end of a base. Probes, events and the ledger only grow, and a trial has the number of the commit that
// changed it last.
type mark struct{ commits, probes, events, ledger int64 }

func markOf(db *sql.DB, commits int64) (mark, error) {
	m := mark{commits: commits}
	err := db.QueryRow(`SELECT (SELECT coalesce(max(rowid), 0) FROM probes), (SELECT coalesce(max(id), 0) FROM events), (SELECT coalesce(max(id), 0) FROM ledger)`).
		Scan(&m.probes, &m.events, &m.ledger)
	return m, err
}

// deltaTables has the queries that copy the rows after a mark into a database in memory. They copy short tables whole.
var deltaTables = []struct {
	query string
	after func(mark) []any
}{
	{`CREATE TABLE delta.studies AS SELECT * FROM main.studies`, func(mark) []any { return nil }},
	{`CREATE TABLE delta.world AS SELECT * FROM main.world`, func(mark) []any { return nil }},
	{`CREATE TABLE delta.trials AS SELECT * FROM main.trials WHERE changed > ?`, func(m mark) []any { return []any{m.commits} }},
	{`CREATE TABLE delta.results AS SELECT * FROM main.results WHERE trial IN (SELECT number FROM delta.trials)`, func(mark) []any { return nil }},
	{`CREATE TABLE delta.probes AS SELECT * FROM main.probes WHERE rowid > ?`, func(m mark) []any { return []any{m.probes} }},
	{`CREATE TABLE delta.events AS SELECT * FROM main.events WHERE id > ?`, func(m mark) []any { return []any{m.events} }},
	{`CREATE TABLE delta.changes AS SELECT * FROM main.changes WHERE event > ?`, func(m mark) []any { return []any{m.events} }},
	{`CREATE TABLE delta.ledger AS SELECT * FROM main.ledger WHERE id > ?`, func(m mark) []any { return []any{m.ledger} }},
}

// joined makes views that show a base and its delta as one database. SQLite looks for a name without a schema among
// temporary names first.
const joined = `
CREATE TEMP VIEW studies AS SELECT * FROM delta.studies;
CREATE TEMP VIEW world AS SELECT * FROM delta.world;
CREATE TEMP VIEW trials AS SELECT * FROM main.trials WHERE number NOT IN (SELECT number FROM delta.trials) UNION ALL SELECT * FROM delta.trials;
CREATE TEMP VIEW results AS SELECT * FROM main.results UNION ALL SELECT * FROM delta.results;
CREATE TEMP VIEW probes AS SELECT * FROM main.probes UNION ALL SELECT * FROM delta.probes;
CREATE TEMP VIEW events AS SELECT * FROM main.events UNION ALL SELECT * FROM delta.events;
CREATE TEMP VIEW ledger AS SELECT * FROM main.ledger UNION ALL SELECT * FROM delta.ledger;
`

// joinedChanges adds the table of schema 5 to joined.
const joinedChanges = `
CREATE TEMP VIEW changes AS SELECT * FROM main.changes UNION ALL SELECT * FROM delta.changes;
`

// merged adds a delta to its base.
const merged = `
DELETE FROM main.studies;
INSERT INTO main.studies SELECT * FROM delta.studies;
DELETE FROM main.world;
INSERT INTO main.world SELECT * FROM delta.world;
INSERT OR REPLACE INTO main.trials SELECT * FROM delta.trials;
INSERT INTO main.results SELECT * FROM delta.results;
INSERT INTO main.probes SELECT * FROM delta.probes;
INSERT INTO main.events SELECT * FROM delta.events;
INSERT INTO main.ledger SELECT * FROM delta.ledger;
`

// mergedChanges adds the table of schema 5 to merged.
const mergedChanges = `
INSERT INTO main.changes SELECT * FROM delta.changes;
`

// deltaSince returns, as an SQLite file, the rows of a live database after a base's mark. It writes nothing to the
// disk.
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
	for _, table := range deltaTables {
		if _, err := conn.ExecContext(ctx, table.query, table.after(base)...); err != nil {
			return nil, fmt.Errorf("%s: %w", table.query, err)
		}
	}
	err = conn.Raw(func(driver any) error {
		content, err = driver.(*sqlite3.SQLiteConn).Serialize("delta")
		return err
	})
	return content, err
}
