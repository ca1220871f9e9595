package studies

import (
	"cmp"
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

// Begin stores a trial before its server starts. It stores Number, Origin, Point, Args and Began; a zero Began means
// now. An unfinished trial may begin again with the same point and args. With AcceptDrift, the args may differ.
func (s *Store) Begin(t Trial) error {
	if t.Point == nil {
		t.Point = space.Point{}
	}
	if t.Began.IsZero() {
		t.Began = time.Now()
	}
	return s.write(fmt.Sprintf("begin trial %d", t.Number), false, func(tx *transaction) error {
		point, pointErr := encode(t.Point)
		args, argsErr := encode(slices.Concat([]string{}, t.Args)) // a trial without args has [] in JSON, and not null
		if err := errors.Join(pointErr, argsErr); err != nil {
			return err
		}
		was, err := trialRow(tx, t.Number)
		switch {
		case errors.Is(err, errNoTrial):
			err = nil
			insertTrial(tx, t, point, args, s.commits+1)
		case err != nil:
		case isDone(was):
			err = errors.New("it is finished already")
		case was.text("point") != point:
			err = fmt.Errorf("it was begun with the point %s, not %s", was.text("point"), point)
		case was.text("args") != args && !s.options.AcceptDrift:
			err = fmt.Errorf("it was begun with the args %s, not %s", was.text("args"), args)
		default:
			tx.change(was, "args", args, "changed", s.commits+1)
		}
		setRunning(tx)
		return err
	})
}

// Served stores the version of a running trial's server, before the trial's first probe. The version may be a change of
// the world that the user has accepted. Then accepted is that change, and another world begins with this trial. The
// zero Change means that the world did not change.
func (s *Store) Served(number int, version string, accepted Change) error {
	return s.write(fmt.Sprintf("store the server of trial %d", number), false, func(tx *transaction) error {
		was, err := trialRow(tx, number)
		if err == nil && isDone(was) {
			err = errors.New("it is finished already")
		}
		if err != nil {
			return err
		}
		tx.change(was, "version", version, "changed", s.commits+1)
		writeFact(tx, factServerVersion, version, noted)
		if accepted.Fact != "" {
			addChanges(tx, int64(number), Drift, Changes{accepted})
		}
		return nil
	})
}

// Finish stores the result of a running trial and publishes it. A finished trial may be finished again, if the result
// is equal.
func (s *Store) Finish(number int, r trial.Result) error {
	return s.write(fmt.Sprintf("finish trial %d", number), true, func(tx *transaction) error {
		was, err := trialRow(tx, number)
		if err != nil {
			return err
		}
		if isDone(was) {
			results := tx.rows(resultsTable, "WHERE trial=?", number)
			if len(results) == 0 {
				return cmp.Or(tx.err, damagedf("trial %d is finished and has no result", number))
			}
			text, err := encode(r)
			return cmp.Or(err, sameAgain(results[0].text("result"), text, func(r trial.Result) (string, error) { return encode(r) }))
		}
		return s.finish(tx, was, r)
	})
}

// abandon ends an unfinished trial, because its next probes would be measured in another world.
func (s *Store) abandon(tx *transaction, why string) error {
	half := tx.rows(trialsTable, "WHERE state=?", Running)
	if len(half) == 0 {
		return nil
	}
	spent := tx.probesTime(half[0].integer("number"))
	r := trial.Result{Outcome: trial.Unknown, Class: serverctl.Aborted, Evidence: why, GPUTime: time.Duration(spent * float64(time.Second))}
	return s.finish(tx, half[0], r)
}

// finish stores a result. It adds the GPU time that was not spent on probes to the ledger.
func (s *Store) finish(tx *transaction, was row, r trial.Result) error {
	text, err := encode(r)
	if err != nil {
		return err
	}
	number := int(was.integer("number"))
	var log any
	if _, err := os.Stat(filepath.Join(s.dir, logs.Name(number))); err == nil { // a simulated server writes no log
		log = logs.Name(number)
	}
	var nearRate, nearHeadroom any // rate and headroom of the failed probe nearest to the SLO; NULL if no probe failed
	for _, p := range tx.rows(probesTable, "WHERE trial=? AND NOT pass ORDER BY headroom DESC, rate LIMIT 1", number) {
		nearRate, nearHeadroom = p.value("rate"), p.value("headroom")
	}
	spent := tx.probesTime(number)
	tx.insert(resultsTable, []any{number, text})
	parts := tx.partsOf(number)
	c := r.Capacity
	tx.change(was, "state", Done, "ended", formatTime(time.Now()), "outcome", r.Outcome, "class", r.Class, "cause", r.Cause, "evidence", r.Evidence,
		"capacity_rps", c.Rate, "passed_rps", c.Low, "failed_rps", c.High, "lowest_rps", c.Lowest, "highest_rps", c.Highest, "std_err", c.StdErr,
		"doubt", c.Doubt, "bound", c.Bound, "binding", c.Binding, "in_flight", c.InFlight, "kv_tokens", r.Facts.KVCacheTokens,
		"gpu_seconds", r.GPUTime.Seconds(), "simulated", r.Facts.Simulated, "version", cmp.Or(r.Facts.Version, was.text("version")),
		"start_seconds", r.Facts.StartUp.Seconds(), "log", log, "near_rps", nearRate, "near_headroom", nearHeadroom,
		"holds_rows", parts.Rows, "holds_sum", parts.Sum, "changed", s.commits+1)
	addToLedger(tx, number, "server", r.GPUTime.Seconds()-spent)
	return nil
}

// probesTime returns the GPU time of a trial's probes, in seconds.
func (t *transaction) probesTime(number any) (seconds float64) {
	for _, probe := range t.rows(probesTable, "WHERE trial=? ORDER BY seq", number) {
		seconds += probe.real("gpu_seconds")
	}
	return seconds
}

// setRunning sets the study's state to Running, and removes the note.
func setRunning(tx *transaction) {
	if tx.err == nil && State(tx.head.text("state")) != Running {
		tx.set("state", Running)
		tx.set("note", "")
	}
}

func insertTrial(tx *transaction, t Trial, point, args string, commit int64) {
	values := make([]any, len(trialsTable.columns)) // the other columns are not known yet
	for name, value := range map[string]any{"number": t.Number, "origin": t.Origin, "point": point, "args": args, "state": Running,
		"began": formatTime(t.Began), "changed": commit} {
		values[trialsTable.index[name]] = value
	}
	tx.insert(trialsTable, values)
}

// isDone reports whether a row of the table trials belongs to a finished trial.
func isDone(trial row) bool { return State(trial.text("state")) == Done }

var errNoTrial = errors.New("the trial was never begun")

// trialRow returns the stored row of a trial.
func trialRow(tx *transaction, number int) (row, error) {
	rows := tx.rows(trialsTable, "WHERE number=?", number)
	if len(rows) == 0 {
		return row{}, cmp.Or(tx.err, errNoTrial)
	}
	return rows[0], nil
}

// sameAgain returns an error if a stored text differs from a new one. Before it compares them, it decodes the stored
// text and encodes the value again, because an older tuner may have known fewer fields.
func sameAgain[T any](was, is string, encode func(T) (string, error)) error {
	var v T
	if err := decode(was, &v); err != nil {
		return fmt.Errorf("read what is stored: %w", err)
	}
	again, err := encode(v)
	if err == nil && again != is {
		err = fmt.Errorf("something else is stored already: %s, not %s", again, is)
	}
	return err
}
