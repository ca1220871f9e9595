package studies

import (
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies/logs"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// Begin stores a trial before anything of it starts: its Number, Origin, Point, Args, and Began, which is now when zero.
// Beginning a half-done trial again is legal with the same point and args; after an accepted drift the args may differ.
func (s *Store) Begin(t Trial) error {
	if t.Point == nil {
		t.Point = space.Point{}
	}
	if t.Began.IsZero() {
		t.Began = time.Now()
	}
	point, err := encode(t.Point)
	if err != nil {
		return fmt.Errorf("begin trial %d: %w", t.Number, err)
	}
	args, err := encode(slices.Concat([]string{}, t.Args)) // [] and not null
	if err != nil {
		return fmt.Errorf("begin trial %d: %w", t.Number, err)
	}
	return s.write(fmt.Sprintf("begin trial %d", t.Number), false, func(tx *transaction) error {
		was, err := trialRow(tx, t.Number)
		switch {
		case errors.Is(err, errNoTrial):
			err = nil
			tx.exec(`INSERT INTO trials (number, origin, point, args, state, began, changed) VALUES (?,?,?,?,?,?,?)`,
				t.Number, t.Origin, point, args, Running, formatTime(t.Began), s.commits+1)
		case err != nil:
		case was.state == Done:
			err = errors.New("it is finished already")
		case was.point != point:
			err = fmt.Errorf("it was begun with the point %s, not %s", was.point, point)
		case was.args != args && !s.options.AcceptDrift:
			err = fmt.Errorf("it was begun with the args %s, not %s", was.args, args)
		default:
			tx.exec(`UPDATE trials SET args=?, changed=? WHERE number=?`, args, s.commits+1, t.Number)
		}
		setRunning(tx)
		return err
	})
}

// Served stores, before a running trial's first probe, of which version its server is. changed says that this is another than before, which the user has
// accepted: from this trial on the world is another.
func (s *Store) Served(number int, version, changed string) error {
	return s.write(fmt.Sprintf("store the server of trial %d", number), false, func(tx *transaction) error {
		was, err := trialRow(tx, number)
		if err == nil && was.state == Done {
			err = errors.New("it is finished already")
		}
		if err != nil {
			return err
		}
		tx.exec(`UPDATE trials SET version=?, changed=? WHERE number=?`, version, s.commits+1, number)
		tx.exec(`INSERT OR REPLACE INTO world (key, value, kind) VALUES ('server version', ?, ?)`, version, noted)
		if changed != "" {
			addEvent(tx, Drift, changed)
			tx.exec(`UPDATE events SET trial=? WHERE id=(SELECT max(id) FROM events)`, number)
		}
		return nil
	})
}

// Finish stores the result of a running trial and publishes it. Finishing twice is legal with an equal result.
func (s *Store) Finish(number int, r trial.Result) error {
	what := fmt.Sprintf("finish trial %d", number)
	text, err := encode(r)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.write(what, true, func(tx *transaction) error {
		was, err := trialRow(tx, number)
		if err != nil {
			return err
		}
		if was.state == Done {
			return sameResult(was.result, text)
		}
		return s.finish(tx, number, r, text)
	})
}

// abandon ends a trial that is half done: what is left of it would be measured in another world.
func (s *Store) abandon(tx *transaction, why string) error {
	var number int
	var spent float64
	err := tx.scan(`SELECT number, (SELECT coalesce(sum(gpu_seconds), 0.0) FROM probes WHERE trial=number) FROM trials WHERE state=?`, []any{Running}, &number, &spent)
	if errors.Is(err, sql.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	r := trial.Result{Outcome: trial.Unknown, Class: serverctl.Aborted, Evidence: why, GPUTime: time.Duration(spent * float64(time.Second))}
	text, err := encode(r)
	if err != nil {
		return err
	}
	return s.finish(tx, number, r, text)
}

// finish stores a result, and what of the GPU time no probe took.
func (s *Store) finish(tx *transaction, number int, r trial.Result, text string) error {
	var probes float64
	if err := tx.scan(`SELECT coalesce(sum(gpu_seconds), 0.0) FROM probes WHERE trial=?`, []any{number}, &probes); err != nil {
		return err
	}
	log := sql.NullString{String: logs.Name(number)}
	if _, err := os.Stat(filepath.Join(s.dir, log.String)); err == nil { // a simulated server has none
		log.Valid = true
	}
	c := r.Capacity
	tx.exec(`UPDATE trials SET state=?, ended=?, outcome=?, class=?, cause=?, evidence=?, capacity_rps=?, passed_rps=?, failed_rps=?,
			lowest_rps=?, highest_rps=?, std_err=?, doubt=?, bound=?, binding=?, in_flight=?, kv_tokens=?, gpu_seconds=?, simulated=?,
			version=coalesce(nullif(?, ''), version, ''), start_seconds=?, log=?, changed=?,
			(near_rps, near_headroom)=(SELECT rate, headroom FROM probes WHERE trial=number AND NOT pass ORDER BY headroom DESC, rate LIMIT 1)
			WHERE number=?`,
		Done, formatTime(time.Now()), r.Outcome, r.Class, r.Cause, r.Evidence, c.Rate, c.Low, c.High,
		c.Lowest, c.Highest, c.StdErr, c.Doubt, c.Bound, c.Binding, c.InFlight, r.Facts.KVCacheTokens, r.GPUTime.Seconds(), r.Facts.Simulated,
		r.Facts.Version, r.Facts.StartUp.Seconds(), log, s.commits+1, number)
	tx.exec(`INSERT INTO results VALUES (?,?)`, number, text)
	addToLedger(tx, number, "server", r.GPUTime.Seconds()-probes)
	return nil
}

// setRunning says that someone is at work.
func setRunning(tx *transaction) {
	tx.exec(`UPDATE studies SET state=?, note='' WHERE state<>?`, Running, Running)
}

// A row is what is stored of a trial, as it is stored.
type row struct {
	point, args, result string
	state               State
}

var errNoTrial = errors.New("the trial was never begun")

func trialRow(tx *transaction, number int) (row, error) {
	var r row
	err := tx.scan(`SELECT point, args, state, coalesce((SELECT result FROM results WHERE trial=number), '') FROM trials WHERE number=?`, []any{number}, &r.point, &r.args, &r.state, &r.result)
	if errors.Is(err, sql.ErrNoRows) {
		err = errNoTrial
	}
	return r, err
}

// sameResult compares what is stored with what is to be stored, by way of the type: an older tuner may have known fewer fields.
func sameResult(was, is string) error {
	var v trial.Result
	if err := decode(was, &v); err != nil {
		return fmt.Errorf("read what is stored: %w", err)
	}
	again, err := encode(v)
	if err != nil {
		return err
	}
	return sameText(again, is)
}

func sameText(was, is string) error {
	if was != is {
		return fmt.Errorf("something else is stored already: %s, not %s", was, is)
	}
	return nil
}
