// Package optuna writes a study as an SQLite file of Optuna's, and reads such files. It never runs Optuna.
package optuna

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"path/filepath"

	_ "github.com/mattn/go-sqlite3" // the driver called sqlite3
)

// Versions in the file. Optuna reads a file only if its Alembic revision is the one that Optuna expects. The schema
// version has been 12 since Optuna began to use Alembic (optuna/storages/_rdb/storage.py, 4.9.0 and 5.0.0).
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

// finite is Optuna's type of a value that is a finite number.
const finite = "FINITE"

// schema creates the tables of schema version 12.
const schema = `
CREATE TABLE studies (study_id INTEGER NOT NULL, study_name VARCHAR(512) NOT NULL, PRIMARY KEY (study_id));
CREATE UNIQUE INDEX ix_studies_study_name ON studies (study_name);
CREATE TABLE version_info (version_info_id INTEGER NOT NULL, schema_version INTEGER, library_version VARCHAR(256),
	PRIMARY KEY (version_info_id), CHECK (version_info_id=1));
CREATE TABLE study_directions (study_direction_id INTEGER NOT NULL, direction VARCHAR(8) NOT NULL, study_id INTEGER NOT NULL,
	objective INTEGER NOT NULL,
	PRIMARY KEY (study_direction_id), UNIQUE (study_id, objective), FOREIGN KEY(study_id) REFERENCES studies (study_id));
CREATE TABLE study_user_attributes (study_user_attribute_id INTEGER NOT NULL, study_id INTEGER, "key" VARCHAR(512), value_json TEXT,
	PRIMARY KEY (study_user_attribute_id), UNIQUE (study_id, "key"), FOREIGN KEY(study_id) REFERENCES studies (study_id));
CREATE TABLE study_system_attributes (study_system_attribute_id INTEGER NOT NULL, study_id INTEGER, "key" VARCHAR(512), value_json TEXT,
	PRIMARY KEY (study_system_attribute_id), UNIQUE (study_id, "key"), FOREIGN KEY(study_id) REFERENCES studies (study_id));
CREATE TABLE trials (trial_id INTEGER NOT NULL, number INTEGER, study_id INTEGER, state VARCHAR(8) NOT NULL, datetime_start DATETIME,
	datetime_complete DATETIME, PRIMARY KEY (trial_id), FOREIGN KEY(study_id) REFERENCES studies (study_id));
CREATE INDEX ix_trials_study_id ON trials (study_id);
CREATE TABLE trial_user_attributes (trial_user_attribute_id INTEGER NOT NULL, trial_id INTEGER, "key" VARCHAR(512), value_json TEXT,
	PRIMARY KEY (trial_user_attribute_id), UNIQUE (trial_id, "key"), FOREIGN KEY(trial_id) REFERENCES trials (trial_id));
CREATE TABLE trial_system_attributes (trial_system_attribute_id INTEGER NOT NULL, trial_id INTEGER, "key" VARCHAR(512), value_json TEXT,
	PRIMARY KEY (trial_system_attribute_id), UNIQUE (trial_id, "key"), FOREIGN KEY(trial_id) REFERENCES trials (trial_id));
CREATE TABLE trial_params (param_id INTEGER NOT NULL, trial_id INTEGER, param_name VARCHAR(512), param_value FLOAT, distribution_json TEXT,
	PRIMARY KEY (param_id), UNIQUE (trial_id, param_name), FOREIGN KEY(trial_id) REFERENCES trials (trial_id));
CREATE TABLE trial_values (trial_value_id INTEGER NOT NULL, trial_id INTEGER NOT NULL, objective INTEGER NOT NULL, value FLOAT,
	value_type VARCHAR(7) NOT NULL,
	PRIMARY KEY (trial_value_id), UNIQUE (trial_id, objective), FOREIGN KEY(trial_id) REFERENCES trials (trial_id));
CREATE TABLE trial_intermediate_values (trial_intermediate_value_id INTEGER NOT NULL, trial_id INTEGER NOT NULL, step INTEGER NOT NULL,
	intermediate_value FLOAT, intermediate_value_type VARCHAR(7) NOT NULL,
	PRIMARY KEY (trial_intermediate_value_id), UNIQUE (trial_id, step), FOREIGN KEY(trial_id) REFERENCES trials (trial_id));
CREATE TABLE trial_heartbeats (trial_heartbeat_id INTEGER NOT NULL, trial_id INTEGER NOT NULL, heartbeat DATETIME NOT NULL,
	PRIMARY KEY (trial_heartbeat_id), UNIQUE (trial_id), FOREIGN KEY(trial_id) REFERENCES trials (trial_id));
CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num));
`

// open opens the SQLite file at path.
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

// inTransaction runs do in one transaction.
func inTransaction(db *sql.DB, do func(*sql.Tx) error) error {
	tx, err := db.Begin()
	if err != nil {
		return fmt.Errorf("begin the transaction: %w", err)
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}
