package studies

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

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
	return s.write(fmt.Sprintf("begin trial %d", t.Number), false, func(tx *sql.Tx) error {
		was, err := trialRow(tx, t.Number)
		switch {
		case errors.Is(err, errNoTrial):
			err = execute(tx, `INSERT INTO trials (number, origin, point, args, state, began) VALUES (?,?,?,?,?,?)`,
				t.Number, t.Origin, point, args, Running, formatTime(t.Began))
		case err != nil:
		case was.state == Done:
			err = errors.New("it is finished already")
		case was.point != point:
			err = fmt.Errorf("it was begun with the point %s, not %s", was.point, point)
		case was.args != args && !s.options.AcceptDrift:
			err = fmt.Errorf("it was begun with the args %s, not %s", was.args, args)
		default:
			err = execute(tx, `UPDATE trials SET args=? WHERE number=?`, args, t.Number)
		}
		if err != nil {
			return err
		}
		return setRunning(tx)
	})
}

// Record stores one probe of a running trial; it is on the disk when Record returns nil. The same probe may be recorded
// twice, a different one under the same Seq is an error.
func (s *Store) Record(number int, p trial.Probe) error {
	what := fmt.Sprintf("record probe %d of trial %d", p.Seq, number)
	text, err := encode(p)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.write(what, false, func(tx *sql.Tx) error {
		row, err := trialRow(tx, number)
		if err != nil {
			return err
		}
		var was string
		err = tx.QueryRow(`SELECT probe FROM probes WHERE trial=? AND seq=?`, number, p.Seq).Scan(&was)
		switch {
		case err == nil:
			return same[trial.Probe](was, text)
		case !errors.Is(err, sql.ErrNoRows):
			return err
		case row.state == Done:
			return errors.New("the trial is finished already")
		}
		if err := insertProbe(tx, number, p, text); err != nil {
			return err
		}
		return setRunning(tx)
	})
}

func insertProbe(tx *sql.Tx, number int, p trial.Probe, text string) error {
	m := p.Measurement
	return execute(tx, `INSERT INTO probes VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)`, number, p.Seq, formatTime(time.Now()),
		p.Rate, p.Verdict.Pass, p.Verdict.Headroom, p.Verdict.Binding, m.Requests, m.Completed, m.Failed,
		m.TTFT.P99, m.TPOT.P99, m.OutputThroughput, m.MeanInFlight, p.HitRate, p.GPUTime.Seconds(), text)
}

// Finish stores the result of a running trial and publishes it. Finishing twice is legal with an equal result.
func (s *Store) Finish(number int, r trial.Result) error {
	what := fmt.Sprintf("finish trial %d", number)
	text, err := encode(r)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return s.write(what, true, func(tx *sql.Tx) error {
		was, err := trialRow(tx, number)
		if err != nil {
			return err
		}
		if was.state == Done {
			return same[trial.Result](was.result, text)
		}
		c := r.Capacity
		return execute(tx, `UPDATE trials SET state=?, ended=?, outcome=?, class=?, evidence=?, capacity_rps=?, passed_rps=?,
			failed_rps=?, bound=?, binding=?, in_flight=?, kv_tokens=?, gpu_seconds=?, simulated=?, result=? WHERE number=?`,
			Done, formatTime(time.Now()), r.Outcome, r.Class, r.Evidence, c.Rate, c.Low, c.High, c.Bound, c.Binding, c.InFlight,
			r.Facts.KVCacheTokens, r.GPUTime.Seconds(), r.Facts.Simulated, text, number)
	})
}

// setRunning says that someone is at work.
func setRunning(tx *sql.Tx) error {
	return execute(tx, `UPDATE studies SET state=?, note='' WHERE state<>?`, Running, Running)
}

// A row is what is stored of a trial, as it is stored.
type row struct {
	point, args, result string
	state               State
}

var errNoTrial = errors.New("the trial was never begun")

func trialRow(tx *sql.Tx, number int) (row, error) {
	var r row
	err := tx.QueryRow(`SELECT point, args, state, coalesce(result, '') FROM trials WHERE number=?`, number).
		Scan(&r.point, &r.args, &r.state, &r.result)
	if errors.Is(err, sql.ErrNoRows) {
		err = errNoTrial
	}
	return r, err
}

// same compares what is stored with what is to be stored, by way of the type: an older tuner may have known fewer fields.
func same[T any](was, is string) error {
	var v T
	if err := decode(was, &v); err != nil {
		return fmt.Errorf("read what is stored: %w", err)
	}
	again, err := encode(v)
	if err != nil {
		return err
	}
	if again != is {
		return fmt.Errorf("something else is stored already: %s, not %s", again, is)
	}
	return nil
}
