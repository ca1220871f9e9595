package studies

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"

	"github.com/mattn/go-sqlite3"
	"golang.org/x/sys/unix"

	"vllmtuner/studies/rights"
)

// migrations[v] brings a database from schema version v to v+1. SQLite's user_version holds the version. docs/schema.md
// describes the tables.
var migrations = []string{`
CREATE TABLE studies (
	id      TEXT PRIMARY KEY,
	name    TEXT NOT NULL,
	seed    TEXT NOT NULL, -- decimal: an unsigned 64-bit number does not fit SQLite's INTEGER
	file    TEXT NOT NULL,
	world   TEXT NOT NULL, -- JSON object
	state   TEXT NOT NULL,
	note    TEXT NOT NULL,
	created TEXT NOT NULL,
	updated TEXT NOT NULL
) STRICT;
CREATE TABLE trials (
	number        INTEGER PRIMARY KEY,
	origin        TEXT NOT NULL,
	point         TEXT NOT NULL, -- JSON object
	args          TEXT NOT NULL, -- JSON array
	state         TEXT NOT NULL,
	began         TEXT NOT NULL,
	ended         TEXT,
	outcome       TEXT,
	class         TEXT,
	evidence      TEXT,
	capacity_rps  REAL,
	passed_rps    REAL,
	failed_rps    REAL,
	bound         TEXT,
	binding       TEXT,
	in_flight     REAL,
	kv_tokens     INTEGER,
	gpu_seconds   REAL,
	simulated     INTEGER,
	result        TEXT -- JSON object
) STRICT;
CREATE TABLE probes (
	trial           INTEGER NOT NULL REFERENCES trials(number),
	seq             INTEGER NOT NULL,
	recorded        TEXT NOT NULL,
	rate            REAL NOT NULL,
	pass            INTEGER NOT NULL,
	headroom        REAL NOT NULL,
	binding         TEXT NOT NULL,
	requests        INTEGER NOT NULL,
	completed       INTEGER NOT NULL,
	failed          INTEGER NOT NULL,
	ttft_p99_ms     REAL NOT NULL,
	tpot_p99_ms     REAL NOT NULL,
	output_tok_s    REAL NOT NULL,
	in_flight       REAL NOT NULL,
	hit_rate        REAL NOT NULL,
	gpu_seconds     REAL NOT NULL,
	probe           TEXT NOT NULL, -- JSON object
	PRIMARY KEY (trial, seq)
) STRICT;
CREATE TABLE events (
	id   INTEGER PRIMARY KEY,
	time TEXT NOT NULL,
	kind TEXT NOT NULL,
	text TEXT NOT NULL
) STRICT;
`, `
ALTER TABLE studies ADD COLUMN commits INTEGER NOT NULL DEFAULT 0;
`, `
CREATE TABLE world (
	key   TEXT PRIMARY KEY,
	value TEXT NOT NULL,
	kind  TEXT NOT NULL -- asked, found, noted
) STRICT;
INSERT INTO world SELECT w.key, w.value, 'asked' FROM studies, json_each(studies.world) AS w;
ALTER TABLE studies DROP COLUMN world;

ALTER TABLE trials ADD COLUMN changed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trials ADD COLUMN cause TEXT;
ALTER TABLE trials ADD COLUMN lowest_rps REAL;
ALTER TABLE trials ADD COLUMN highest_rps REAL;
ALTER TABLE trials ADD COLUMN std_err REAL;
ALTER TABLE trials ADD COLUMN doubt TEXT;
ALTER TABLE trials ADD COLUMN version TEXT;
ALTER TABLE trials ADD COLUMN start_seconds REAL;
ALTER TABLE trials ADD COLUMN log TEXT;
ALTER TABLE trials ADD COLUMN near_rps REAL;
ALTER TABLE trials ADD COLUMN near_headroom REAL;
UPDATE trials SET (near_rps, near_headroom)=(SELECT rate, headroom FROM probes WHERE trial=number AND NOT pass ORDER BY headroom DESC, rate LIMIT 1)
	WHERE result IS NOT NULL;
UPDATE trials SET cause=coalesce(result->>'$.cause', ''),
	lowest_rps=coalesce(result->>'$.capacity.lowest', 0.0)+0.0, highest_rps=coalesce(result->>'$.capacity.highest', 0.0)+0.0,
	std_err=coalesce(result->>'$.capacity.std_err', 0.0)+0.0, doubt=coalesce(result->>'$.capacity.doubt', ''),
	version=coalesce(result->>'$.facts.version', ''), start_seconds=coalesce(result->>'$.facts.start_up_ns', 0)/1e9
	WHERE result IS NOT NULL;
CREATE TABLE results ( -- apart, so that those who look at all trials need not read them
	trial  INTEGER PRIMARY KEY REFERENCES trials(number),
	result TEXT NOT NULL -- JSON object
) STRICT;
INSERT INTO results SELECT number, result FROM trials WHERE result IS NOT NULL;
ALTER TABLE trials DROP COLUMN result;
CREATE INDEX trials_changed ON trials(changed);

ALTER TABLE probes ADD COLUMN series BLOB; -- compressed
ALTER TABLE probes ADD COLUMN sketches BLOB;

CREATE TABLE ledger (
	id          INTEGER PRIMARY KEY,
	time        TEXT NOT NULL,
	trial       INTEGER NOT NULL,
	what        TEXT NOT NULL, -- server, probe
	gpu_seconds REAL NOT NULL
) STRICT;
INSERT INTO ledger (time, trial, what, gpu_seconds)
	SELECT recorded, trial, 'probe', gpu_seconds FROM probes
	UNION ALL SELECT t.ended, t.number, 'server',
		t.gpu_seconds - (SELECT coalesce(sum(p.gpu_seconds), 0) FROM probes p WHERE p.trial = t.number) FROM trials t WHERE t.ended IS NOT NULL
	ORDER BY 1;

ALTER TABLE events ADD COLUMN trial INTEGER NOT NULL DEFAULT 0; -- the first that began after it
UPDATE events SET trial=(SELECT count(*) FROM trials WHERE began < events.time);

CREATE TABLE priors (
	id     INTEGER PRIMARY KEY,
	source TEXT NOT NULL, -- what it was read from
	trial  TEXT NOT NULL  -- JSON object
) STRICT;
`, `
ALTER TABLE studies ADD COLUMN holds TEXT NOT NULL DEFAULT '{}'; -- JSON object
ALTER TABLE trials ADD COLUMN holds_rows INTEGER;
ALTER TABLE trials ADD COLUMN holds_sum INTEGER;
ALTER TABLE probes ADD COLUMN long_sum INTEGER;
ALTER TABLE studies ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE world ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE trials ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE results ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE probes ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ledger ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE priors ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
ALTER TABLE events ADD COLUMN sum INTEGER NOT NULL DEFAULT 0;
`, `
CREATE TABLE changes (
	event        INTEGER NOT NULL REFERENCES events(id),
	seq          INTEGER NOT NULL,
	fact         TEXT NOT NULL, -- a key of the world, or the seed
	was          TEXT, -- NULL: nothing was known
	now          TEXT, -- likewise
	was_in_trial INTEGER, -- NULL: no trial showed it
	sum          INTEGER NOT NULL,
	PRIMARY KEY (event, seq)
) STRICT;
CREATE TABLE sources (
	name  TEXT PRIMARY KEY, -- priors.source
	path  TEXT NOT NULL,    -- the file or directory that was read
	world INTEGER,          -- which world of the study at path; NULL: it has one world, or is no study
	sum   INTEGER NOT NULL
) STRICT;
`, `
CREATE TABLE spent (
	what    TEXT PRIMARY KEY, -- a trial.Part
	seconds REAL NOT NULL,
	sum     INTEGER NOT NULL
) STRICT;
`}

// countsCommits is the first version that counts its commits.
const countsCommits = 2

// hasSums is the first version whose rows carry checksums.
const hasSums = 4

// hasChanges is the first version that stores changes of the world, and the paths of priors, as values. In older
// versions, a change was a line in an event's text, and a path was the beginning of a source's name.
const hasChanges = 5

// hasSpent is the first version that books all time of a study.
const hasSpent = 6

// application returns SQLite's application_id for a schema version. Each version has an ID of its own, so that a
// damaged version number is noticed.
func application(version int) int {
	if version < hasSums {
		return 0
	}
	return 0x74756e00 + version // "tun"
}

// liveOptions are the options to open the live database. WAL is not used, because it needs memory shared between hosts,
// which NFS does not give. EXCLUSIVE keeps the locks and the journal open from commit to commit: a commit on NFSv4.2
// needed 4 round trips with EXCLUSIVE, and 20 to 30 with NORMAL. PERSIST overwrites the journal's header with zeros at
// the end of a transaction. If SQLite removed the journal instead, another host's stale directory cache could hide a
// journal that must be rolled back.
const liveOptions = "mode=rwc&_journal_mode=PERSIST&_synchronous=FULL&_locking_mode=EXCLUSIVE&_txlock=immediate" +
	"&_busy_timeout=5000&_foreign_keys=1"

// publishedOptions are the options to open a file that is never written again. With them SQLite uses no lock and no
// journal, and creates no other file. database/sql uses a connection in one goroutine at a time, so SQLite need not
// lock its mutex for each value.
const publishedOptions = "mode=ro&immutable=1&_mutex=no"

// scratchOptions are the options to write a file that is useless until it is complete. So the file needs no journal and
// no sync.
const scratchOptions = "mode=rw&_journal_mode=OFF&_synchronous=OFF&_locking_mode=EXCLUSIVE&_txlock=immediate"

// connector opens one SQLite file. It implements driver.Connector, so that no driver is registered for the whole
// process.
type connector struct{ dsn string }

func (c connector) Driver() driver.Driver {
	return &sqlite3.SQLiteDriver{ConnectHook: func(conn *sqlite3.SQLiteConn) error {
		// mmap is off: if the NFS server is lost, reading a mapped page ends the process with SIGBUS. Temporary data is
		// in memory: files for it would be on a disk that was not checked.
		_, err := conn.Exec("PRAGMA mmap_size=0; PRAGMA temp_store=MEMORY", nil)
		return err
	}}
}

func (c connector) Connect(context.Context) (driver.Conn, error) { return c.Driver().Open(c.dsn) }

// openFile opens the SQLite file at path with one connection, because SQLite's locks belong to a connection.
func openFile(path, options string) (*sql.DB, error) {
	name, err := uri(path, options)
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector{name})
	db.SetMaxOpenConns(1)
	return db, nil
}

// uri returns the name by which SQLite opens a file with the given options.
func uri(path, options string) (string, error) {
	path, err := filepath.Abs(path)
	name := url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: options}
	return name.String(), err
}

// inFile opens an SQLite file, calls the callback with it, and closes it.
func inFile[T any](path, options string, callback func(*sql.DB) (T, error)) (result T, err error) {
	db, err := openFile(path, options)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	return callback(db)
}

// openLive opens the live database. It creates the file itself, with the study's permissions: a file that SQLite
// creates can be read by everybody. SQLite gives the journal the same permissions as the database.
func openLive(path string) (*sql.DB, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NONBLOCK, rights.File(filepath.Dir(path)))
	if err == nil {
		err = file.Close()
	}
	if err != nil {
		return nil, err
	}
	return openFile(path, liveOptions)
}

// A newerError says that a database has a schema that this tuner does not know.
type newerError struct{ version int }

func (e newerError) Error() string {
	return fmt.Sprintf("written by a newer tuner (schema %d, this one knows %d): use that one", e.version, len(migrations))
}

// schemaVersion returns the version of a database, and a newerError when this tuner does not know the version. An empty
// database has version 0.
func schemaVersion(db *sql.DB) (version int, err error) {
	err = db.QueryRow("PRAGMA user_version").Scan(&version)
	if err != nil {
		return 0, err
	}
	var id int
	if err := db.QueryRow("PRAGMA application_id").Scan(&id); err != nil {
		return 0, err
	}
	if version < 0 || id != application(version) {
		return 0, damagedf("its header has a wrong schema version, %d", version)
	}
	if version > len(migrations) {
		return version, newerError{version}
	}
	return version, nil
}

// migrate brings the database to the newest schema, in one transaction for each version.
func migrate(db *sql.DB) error {
	version, err := schemaVersion(db)
	if err != nil {
		return err
	}
	for ; version < len(migrations); version++ {
		next := version + 1
		step := migrations[version] + fmt.Sprintf("PRAGMA user_version=%d; PRAGMA application_id=%d", next, application(next))
		err := transact(db, func(tx *transaction) error {
			if tx.exec(step); tx.err != nil {
				return tx.err
			}
			switch next {
			case hasSums:
				return tx.sealAll()
			case hasChanges:
				return tx.inOldStudy(func(tx *transaction) error { return errors.Join(tx.splitChanges(), tx.splitSources()) })
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("migrate to schema %d: %w", next, explainSQLite(err))
		}
	}
	return nil
}

// A transaction runs statements until one fails, and none after that. After a disk error, SQLite has rolled back the
// transaction already, and would commit each later statement by itself.
type transaction struct {
	tx  *sql.Tx
	err error

	head row     // the study's own row; set only while inStudy runs
	sums rowSums // rows and sums of all tables; set only while inStudy or sealAll runs
}

// exec runs a statement that returns no rows. If it fails, transact returns the error.
func (t *transaction) exec(query string, args ...any) {
	if t.err == nil {
		_, t.err = t.tx.Exec(query, args...)
	}
}

// transact runs the callback in one transaction. The transaction is on the disk when transact returns nil.
func transact(db *sql.DB, callback func(*transaction) error) error {
	tx, err := db.Begin()
	if err != nil {
		return fmt.Errorf("begin the transaction: %w", err)
	}
	t := &transaction{tx: tx}
	err = callback(t)
	if t.err != nil { // the error of the first statement that failed
		err = t.err
	}
	if err != nil {
		return errors.Join(err, tx.Rollback())
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}
