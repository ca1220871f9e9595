// Package optuna writes a study as an SQLite file in Optuna's format, and reads such files. It never runs Optuna.
package optuna

import (
	"database/sql"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"

	_ "github.com/mattn/go-sqlite3" // the driver called sqlite3
)

// These are the versions in the file. Optuna reads a file only if its Alembic revision is the one that Optuna expects.
// The schema version has been 12 since Optuna began to use Alembic (optuna/storages/_rdb/storage.py, 4.9.0 and 5.0.0).
const (
	schemaVersion  = 12
	revision       = "v3.2.0.a"
	libraryVersion = "4.9.0"
)

// A state is Optuna's state of a trial.
type state string

const (
	complete state = "COMPLETE"
	pruned   state = "PRUNED"
	fail     state = "FAIL"
	running  state = "RUNNING"
)

// finite is how Optuna marks a value that is a finite number.
const finite = "FINITE"

// schema creates the tables of schema version 12.
//
//go:embed schema-4.9.0.sql
var schema string

// open opens the SQLite file at path. The query has the settings in the form of SQLite's URIs.
func open(path, query string) (*sql.DB, error) {
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	name := url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: query}
	db, err := sql.Open("sqlite3", name.String())
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(1)
	return db, nil
}

// inTransaction runs the callback in one transaction.
func inTransaction(db *sql.DB, callback func(*sql.Tx) error) error {
	tx, err := db.Begin()
	if err != nil {
		return fmt.Errorf("begin the transaction: %w", err)
	}
	if err := callback(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}
