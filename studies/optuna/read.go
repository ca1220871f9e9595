package optuna

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"

	"vllmtuner/foreign"
)

// A Study is an Optuna study in a file.
type Study struct {
	Name       string
	Directions []string                   // MINIMIZE or MAXIMIZE, one for each objective
	User       map[string]json.RawMessage // user attributes
	Trials     []*Trial                   // ordered by number
}

// A Trial is a trial of a Study.
type Trial struct {
	Number int
	State  string                     // COMPLETE, PRUNED, FAIL, RUNNING or WAITING
	Value  *float64                   // value of the first objective; nil if there is no finite value
	Params map[string]string          // values as text; parameters with the value None are left out
	User   map[string]json.RawMessage // user attributes
}

// magic is the beginning of every SQLite file.
const magic = "SQLite format 3\x00"

// IsSQLite reports whether the file at path is an SQLite file.
func IsSQLite(path string) (bool, error) {
	f, err := foreign.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	head := make([]byte, len(magic))
	_, err = io.ReadFull(f, head)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return false, nil
	}
	return string(head) == magic, err
}

// Read reads all studies in a file. It writes nothing. Optuna may write to the file at the same time.
func Read(path string) (all []*Study, err error) {
	db, err := open(path, "mode=ro&_query_only=1&_busy_timeout=5000")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	err = inTransaction(db, func(tx *sql.Tx) error {
		r := &reader{tx: tx}
		r.checkVersion(filepath.Base(path))
		all = r.read()
		return r.err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return all, nil
}

// A reader reads one file. It keeps its first error and then reads nothing more.
type reader struct {
	tx  *sql.Tx
	err error
}

func (r *reader) fail(format string, args ...any) { r.err = cmp.Or(r.err, fmt.Errorf(format, args...)) }

// checkVersion refuses a file whose schema is not the revision that this package knows.
func (r *reader) checkVersion(name string) {
	var isOptuna bool
	var found string
	err := r.tx.QueryRow(`SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE name='alembic_version' AND type='table')`).Scan(&isOptuna)
	if err == nil && isOptuna {
		err = r.tx.QueryRow(`SELECT version_num FROM alembic_version`).Scan(&found)
	}
	switch {
	case err != nil:
		r.err = err
	case !isOptuna:
		r.fail("it is an SQLite file, but not one of Optuna's; give a file that Optuna's RDBStorage or `tuner export --format sqlite` wrote")
	case found != revision:
		r.fail("its schema is %s, and only %s can be read; upgrade a copy: optuna storage upgrade --storage sqlite:///%s", found, revision, name)
	}
}

// rows returns an iterator over the rows of a query. Each round of the loop scans one row into the given pointers.
func (r *reader) rows(query string, into ...any) func(yield func() bool) {
	return func(yield func() bool) {
		if r.err != nil {
			return
		}
		rows, err := r.tx.Query(query)
		if err != nil {
			r.err = err
			return
		}
		defer func() { r.err = cmp.Or(r.err, rows.Err(), rows.Close()) }()
		for rows.Next() {
			if err := rows.Scan(into...); err != nil {
				r.fail("%s: a row that Optuna would not write: %w; give a file that Optuna can read", query, err)
				return
			}
			if !yield() || r.err != nil {
				return
			}
		}
	}
}

// read reads all studies. Rows that belong to no study are left out.
func (r *reader) read() (all []*Study) {
	studies := map[int64]*Study{} // the studies by Optuna's study_id
	var id int64
	var name, direction string
	for range r.rows(`SELECT study_id, study_name FROM studies ORDER BY study_id`, &id, &name) {
		studies[id] = &Study{Name: name, User: map[string]json.RawMessage{}}
		all = append(all, studies[id])
	}
	for range r.rows(`SELECT study_id, direction FROM study_directions ORDER BY objective`, &id, &direction) {
		if s := studies[id]; s != nil {
			s.Directions = append(s.Directions, direction)
		}
	}
	var study sql.NullInt64
	var key, value sql.NullString
	for range r.rows(`SELECT study_id, "key", value_json FROM study_user_attributes`, &study, &key, &value) {
		if s := studies[study.Int64]; s != nil && value.Valid {
			s.User[key.String] = json.RawMessage(value.String)
		}
	}
	r.trials(studies)
	return all
}

// trials reads the trials of the studies, with their values, parameters and attributes.
func (r *reader) trials(studies map[int64]*Study) {
	trials := map[int64]*Trial{} // the trials by Optuna's trial_id
	var id int64
	var study, number sql.NullInt64
	var state string
	for range r.rows(`SELECT trial_id, study_id, number, state FROM trials ORDER BY number`, &id, &study, &number, &state) {
		s := studies[study.Int64]
		switch {
		case s == nil:
		case !number.Valid:
			r.fail("trial_id %d: the trial has no number: correct it in trials, or delete the row", id)
		default:
			t := &Trial{Number: int(number.Int64), State: state, Params: map[string]string{}, User: map[string]json.RawMessage{}}
			trials[id], s.Trials = t, append(s.Trials, t)
		}
	}
	var value any
	for range r.rows(`SELECT trial_id, value FROM trial_values WHERE objective=0 AND value_type='FINITE'`, &id, &value) {
		if t := trials[id]; t != nil {
			v, err := numberOf(value, "trial_values")
			if err != nil {
				r.fail("trial %d: its value is %w", t.Number, err)
			}
			t.Value = &v
		}
	}
	var key, text sql.NullString
	for range r.rows(`SELECT trial_id, param_name, param_value, distribution_json FROM trial_params`, &id, &key, &value, &text) {
		if t := trials[id]; t != nil {
			r.param(t, key.String, value, text.String)
		}
	}
	for range r.rows(`SELECT trial_id, "key", value_json FROM trial_user_attributes`, &id, &key, &text) {
		if t := trials[id]; t != nil && text.Valid {
			t.User[key.String] = json.RawMessage(text.String)
		}
	}
}

// param adds a parameter to a trial.
func (r *reader) param(t *Trial, name string, value any, distribution string) {
	v, err := numberOf(value, "trial_params")
	if err != nil {
		r.fail("trial %d: parameter %s: it is %w", t.Number, name, err)
		return
	}
	switch text, ok, err := decodeParam(v, []byte(distribution)); {
	case err != nil:
		r.fail("trial %d: parameter %s: %w", t.Number, name, err)
	case ok:
		t.Params[name] = text
	}
}

// numberOf returns a value in a table as a finite number, or an error if it is not one. SQLite stores values of any
// type in any column.
func numberOf(value any, table string) (float64, error) {
	text := fmt.Sprint(value)
	switch v := value.(type) {
	case float64:
		if !math.IsInf(v, 0) && !math.IsNaN(v) {
			return v, nil
		}
	case int64:
		return float64(v), nil
	case nil:
		text = "NULL"
	case []byte, string:
		text = fmt.Sprintf("%.40q", v)
	}
	return 0, fmt.Errorf("%s, which is not a finite number: correct it in %s, or delete the row", text, table)
}
