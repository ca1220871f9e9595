package optuna

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"

	"vllmtuner/foreign"
)

// A Study is an Optuna study in a file.
type Study struct {
	Name       string
	Directions []string                   // MINIMIZE or MAXIMIZE, one for each objective
	User       map[string]json.RawMessage // user attributes
	Trials     []Trial                    // by number
}

// A Trial is a trial of a Study.
type Trial struct {
	Number int
	State  string                     // COMPLETE, PRUNED, FAIL, RUNNING or WAITING
	Value  *float64                   // value of the first objective; nil if there is no finite value
	Params map[string]string          // values as text, without those that are None
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

// Read reads all studies of a file. It writes nothing, and Optuna may be writing the file meanwhile.
func Read(path string) (all []Study, err error) {
	db, err := open(path, "mode=ro&_query_only=1&_busy_timeout=5000")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	err = inTransaction(db, func(tx *sql.Tx) error {
		r := &reader{tx: tx, trials: map[int64]position{}}
		if err := r.checkVersion(filepath.Base(path)); err != nil {
			return err
		}
		all, err = r.read()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return all, nil
}

// A reader reads one file.
type reader struct {
	tx     *sql.Tx
	all    []Study
	trials map[int64]position // by Optuna's trial_id
}

// A position holds the indexes of a trial: of its study, and of the trial in the study.
type position struct{ study, trial int }

// checkVersion refuses a file with another schema.
func (r *reader) checkVersion(name string) error {
	var found string
	err := r.tx.QueryRow(`SELECT version_num FROM alembic_version`).Scan(&found)
	switch {
	case err != nil && strings.Contains(err.Error(), "no such table"):
		return errors.New("it is an SQLite file, but not one of Optuna's; give a file that Optuna's RDBStorage or `tuner export --format sqlite` wrote")
	case err != nil:
		return err
	case found != revision:
		return fmt.Errorf("its schema is %s, and only %s can be read; upgrade a copy: optuna storage upgrade --storage sqlite:///%s", found, revision, name)
	}
	return nil
}

func (r *reader) read() ([]Study, error) {
	indexes := map[int64]int{} // indexes in r.all by Optuna's study_id
	err := r.each(`SELECT study_id, study_name FROM studies ORDER BY study_id`, func(scan func(...any) error) error {
		var id int64
		s := Study{User: map[string]json.RawMessage{}}
		err := scan(&id, &s.Name)
		indexes[id] = len(r.all)
		r.all = append(r.all, s)
		return err
	})
	if err != nil {
		return nil, err
	}
	err = r.each(`SELECT study_id, direction FROM study_directions ORDER BY objective`, func(scan func(...any) error) error {
		var id int64
		var direction string
		err := scan(&id, &direction)
		if i, ok := indexes[id]; ok {
			r.all[i].Directions = append(r.all[i].Directions, direction)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	err = r.each(`SELECT study_id, "key", value_json FROM study_user_attributes`, func(scan func(...any) error) error {
		var id sql.NullInt64
		var key, value sql.NullString
		err := scan(&id, &key, &value)
		if i, ok := indexes[id.Int64]; ok && value.Valid {
			r.all[i].User[key.String] = json.RawMessage(value.String)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	err = r.each(`SELECT trial_id, study_id, number, state FROM trials ORDER BY number`, func(scan func(...any) error) error {
		var id int64
		var study, number sql.NullInt64
		t := Trial{Params: map[string]string{}, User: map[string]json.RawMessage{}}
		err := scan(&id, &study, &number, &t.State)
		if i, ok := indexes[study.Int64]; ok && err == nil {
			if t.Number = int(number.Int64); !number.Valid {
				return fmt.Errorf("trial_id %d: the trial has no number: correct it in trials, or delete the row", id)
			}
			r.trials[id] = position{i, len(r.all[i].Trials)}
			r.all[i].Trials = append(r.all[i].Trials, t)
		}
		return err
	})
	return r.all, errors.Join(err, r.values(), r.params(), r.attributes())
}

func (r *reader) values() error {
	return r.each(`SELECT trial_id, value FROM trial_values WHERE objective=0 AND value_type='FINITE'`, func(scan func(...any) error) error {
		var id int64
		var value any
		if err := scan(&id, &value); err != nil {
			return err
		}
		t := r.trial(id)
		if t == nil {
			return nil
		}
		v, ok := numberOf(value)
		if !ok {
			return fmt.Errorf("trial %d: its value is %s where a finite number should be: correct it in trial_values, or delete the row", t.Number, textOf(value))
		}
		t.Value = &v
		return nil
	})
}

// numberOf returns a value of SQLite as a finite number, if it is one. SQLite stores values of any type in any column.
func numberOf(value any) (v float64, ok bool) {
	switch v := value.(type) {
	case float64:
		return v, !math.IsInf(v, 0) && !math.IsNaN(v)
	case int64:
		return float64(v), true
	}
	return 0, false
}

// textOf writes a value of SQLite for an error message.
func textOf(value any) string {
	switch v := value.(type) {
	case nil:
		return "NULL"
	case []byte, string:
		return fmt.Sprintf("%.40q", v)
	}
	return fmt.Sprint(value)
}

func (r *reader) params() error {
	return r.each(`SELECT trial_id, param_name, param_value, distribution_json FROM trial_params`, func(scan func(...any) error) error {
		var id int64
		var name, dist sql.NullString
		var value any
		if err := scan(&id, &name, &value, &dist); err != nil {
			return err
		}
		t := r.trial(id)
		if t == nil {
			return nil
		}
		v, ok := numberOf(value)
		if !ok {
			return fmt.Errorf("trial %d: parameter %s: it is %s where a finite number should be: correct it in trial_params, or delete the row", t.Number, name.String, textOf(value))
		}
		text, ok, err := decodeParam(v, []byte(dist.String))
		if err != nil {
			return fmt.Errorf("trial %d: parameter %s: %w", t.Number, name.String, err)
		}
		if ok {
			t.Params[name.String] = text
		}
		return nil
	})
}

func (r *reader) attributes() error {
	return r.each(`SELECT trial_id, "key", value_json FROM trial_user_attributes`, func(scan func(...any) error) error {
		var id int64
		var key, value sql.NullString
		err := scan(&id, &key, &value)
		if t := r.trial(id); t != nil && value.Valid {
			t.User[key.String] = json.RawMessage(value.String)
		}
		return err
	})
}

// trial returns the trial with Optuna's trial_id; nil if it belongs to no study.
func (r *reader) trial(id int64) *Trial {
	at, ok := r.trials[id]
	if !ok {
		return nil
	}
	return &r.all[at.study].Trials[at.trial]
}

// each calls do for every row of a query.
func (r *reader) each(query string, do func(scan func(...any) error) error) (err error) {
	rows, err := r.tx.Query(query)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	for rows.Next() {
		scan := func(into ...any) error {
			if err := rows.Scan(into...); err != nil {
				return fmt.Errorf("%s: a row that Optuna does not write: %w; give a copy that Optuna reads", query, err)
			}
			return nil
		}
		if err := do(scan); err != nil {
			return err
		}
	}
	return nil
}
