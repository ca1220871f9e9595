package studies

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/trial"
)

// load returns all of a database.
func load(db *sql.DB) (Study, error) {
	study, err := loadStudy(db)
	if err != nil {
		return Study{}, err
	}
	if study.Trials, err = loadTrials(db, ""); err != nil {
		return Study{}, err
	}
	discount(study.Trials)
	return study, loadProbes(db, study.Trials, long, "")
}

// summarize returns the trials by their columns, and those that are wanted whole with their results and probes.
func summarize(db *sql.DB, whole func(Study) []int, columns probeColumns) (Study, error) {
	study, err := loadStudy(db)
	if err != nil {
		return Study{}, err
	}
	if study.Trials, err = loadSummaries(db); err != nil {
		return Study{}, err
	}
	discount(study.Trials)
	numbers, err := withNearest(db, whole(study))
	if err != nil || len(numbers) == 0 {
		return study, err
	}
	marks := "(" + strings.Repeat("?,", len(numbers)-1) + "?)"
	args := make([]any, len(numbers))
	for i, n := range numbers {
		args[i] = n
	}
	trials, err := loadTrials(db, "WHERE number IN "+marks, args...)
	if err != nil {
		return Study{}, err
	}
	if err := loadProbes(db, trials, columns, "WHERE trial IN "+marks, args...); err != nil {
		return Study{}, err
	}
	for _, t := range trials {
		i, _ := slices.BinarySearchFunc(study.Trials, t.Number, func(t Trial, n int) int { return t.Number - n })
		study.Trials[i] = t.as(study.Trials[i])
	}
	return study, nil
}

// Nearest stands among the trials that are wanted whole for the one that came nearest to the SLO: of the probes that failed, in trials that
// were measured, it has the one with the most headroom, and of equals that at the lowest rate. Columns of its trial say so, where to read all probes
// of a long study would take seconds.
const Nearest = -1

// withNearest puts the number of the trial that came nearest in the place of Nearest; nothing where no probe failed.
func withNearest(db *sql.DB, numbers []int) ([]int, error) {
	i := slices.Index(numbers, Nearest)
	if i < 0 {
		return numbers, nil
	}
	var number int
	err := db.QueryRow(`SELECT number FROM trials WHERE outcome = ? AND near_headroom IS NOT NULL
		ORDER BY near_headroom DESC, near_rps, number LIMIT 1`, trial.Measured).Scan(&number)
	if errors.Is(err, sql.ErrNoRows) {
		return slices.Delete(slices.Clone(numbers), i, i+1), nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the trial that came nearest to the SLO: %w", err)
	}
	numbers = slices.Clone(numbers)
	numbers[i] = number
	return numbers, nil
}

// loadStudy returns the study without its trials; sql.ErrNoRows when it was never begun.
func loadStudy(db *sql.DB) (s Study, err error) {
	var seed, created, updated string
	err = db.QueryRow(`SELECT id, name, seed, file, state, note, created, updated, commits FROM studies`).
		Scan(&s.ID, &s.Name, &seed, &s.File, &s.State, &s.Note, &created, &updated, &s.Commits)
	if err != nil {
		return Study{}, err
	}
	s.Seed, err = strconv.ParseUint(seed, 10, 64)
	if err := errors.Join(err, parseTime(created, &s.Created), parseTime(updated, &s.Updated), loadWorld(db, &s)); err != nil {
		return Study{}, err
	}
	if s.Events, err = loadEvents(db); err != nil {
		return Study{}, err
	}
	s.Prior, err = loadPriors(db)
	return s, err
}

func loadEvents(db *sql.DB) (all []Event, err error) {
	rows, err := db.Query(`SELECT time, kind, text, trial FROM events ORDER BY id`)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	for rows.Next() {
		var e Event
		var at string
		if err := rows.Scan(&at, &e.Kind, &e.Text, &e.Trial); err != nil {
			return nil, err
		}
		if err := parseTime(at, &e.Time); err != nil {
			return nil, err
		}
		all = append(all, e)
	}
	return all, nil
}

// loadTrials returns whole trials but for their probes. where chooses among them.
func loadTrials(db *sql.DB, where string, args ...any) ([]Trial, error) {
	return queryTrials(db, 0, `(SELECT result FROM results WHERE trial=number) FROM trials `+where+` ORDER BY number`, func(t *Trial) ([]any, func() error) {
		var result sql.NullString
		return []any{&result}, func() error {
			if !result.Valid {
				return nil
			}
			return decode(result.String, &t.Result)
		}
	}, args...)
}

// loadSummaries returns all trials as far as they have columns, which takes a tenth of the time.
func loadSummaries(db *sql.DB) ([]Trial, error) {
	const columns = `coalesce(outcome, ''), coalesce(class, ''), coalesce(cause, ''), coalesce(evidence, ''), coalesce(capacity_rps, 0.0),
		coalesce(passed_rps, 0.0), coalesce(failed_rps, 0.0), coalesce(lowest_rps, 0.0), coalesce(highest_rps, 0.0), coalesce(std_err, 0.0),
		coalesce(doubt, ''), coalesce(bound, ''), coalesce(binding, ''), coalesce(in_flight, 0.0), coalesce(kv_tokens, 0),
		coalesce(gpu_seconds, 0.0), coalesce(simulated, 0), coalesce(start_seconds, 0.0)`
	var n int
	if err := db.QueryRow(`SELECT count(*) FROM trials`).Scan(&n); err != nil {
		return nil, err
	}
	return queryTrials(db, n, columns+` FROM trials ORDER BY number`, func(t *Trial) ([]any, func() error) {
		r := &t.Result
		c, f := &r.Capacity, &r.Facts
		var gpu, start float64
		return []any{&r.Outcome, &r.Class, &r.Cause, &r.Evidence, &c.Rate, &c.Low, &c.High, &c.Lowest, &c.Highest, &c.StdErr, &c.Doubt, &c.Bound,
				&c.Binding, &c.InFlight, &f.KVCacheTokens, &gpu, &f.Simulated, &start}, func() error {
				r.GPUTime, f.StartUp = seconds(gpu), seconds(start)
				if t.State == Done {
					f.Version = t.Version
				}
				return nil
			}
	})
}

// seconds is exact to the microsecond, which the columns hold for a hundred years.
func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Microsecond)
}

// queryTrials returns the trials that a query finds, about so many: what all trials have, and what more says. The columns are read into one Trial again and again, as
// ten thousand of them take long enough.
func queryTrials(db *sql.DB, about int, query string, more func(*Trial) (columns []any, done func() error), args ...any) (trials []Trial, err error) {
	rows, err := db.Query(`SELECT number, origin, point, args, state, began, ended, coalesce(version, ''), `+query, args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Err(), rows.Close()) }()
	trials = slices.Grow(trials, about)
	var t Trial
	var point, arguments, began string
	var ended sql.NullString
	columns, done := more(&t)
	columns = append([]any{&t.Number, &t.Origin, &point, &arguments, &t.State, &began, &ended, &t.Version}, columns...)
	for rows.Next() {
		t = Trial{}
		if err := rows.Scan(columns...); err != nil {
			return nil, err
		}
		err := errors.Join(decodeMap(point, (*map[string]string)(&t.Point)), decodeList(arguments, &t.Args), parseTime(began, &t.Began), done())
		if ended.Valid {
			err = errors.Join(err, parseTime(ended.String, &t.Ended))
		}
		if err != nil {
			return nil, fmt.Errorf("trial %d: %w", t.Number, err)
		}
		trials = append(trials, t)
	}
	return trials, nil
}
