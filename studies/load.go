package studies

import (
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A loader reads a study from a database. It checks each row against the row's checksum, and each table against its
// stored rowSum.
type loader struct {
	db     *sql.DB
	schema int
	study  Study
	sums   rowSums
	parts  []rowSum // for each trial: the number of rows of its result and probes, and the sum of their checksums; zero until the trial is finished
}

// load reads the whole study.
func load(db *sql.DB) (Study, error) {
	r, err := readSummaries(db)
	if err == nil {
		err = r.fill(r.study.Trials, long, "")
	}
	return r.study, err
}

// summarize reads the row of each trial. For the trials whose numbers selectTrials returns, it also reads results and
// probes.
func summarize(db *sql.DB, selectTrials func(Study) []int, columns probeColumns) (Study, error) {
	r, err := readSummaries(db)
	if err != nil {
		return r.study, err
	}
	numbers, err := r.withNearest(selectTrials(r.study))
	if err != nil || len(numbers) == 0 {
		return r.study, err
	}
	var trials []Trial
	for i := range r.study.Trials {
		if slices.Contains(numbers, r.study.Trials[i].Number) {
			trials = append(trials, r.study.Trials[i])
		}
	}
	list, err := encode(numbers)
	if err == nil {
		err = r.fill(trials, columns, "WHERE trial IN (SELECT value FROM json_each(?))", list)
	}
	for _, t := range trials {
		r.study.Trials[r.indexOf(t.Number)] = t
	}
	return r.study, err
}

// loadSummary reads the row of each trial, without results and probes.
func loadSummary(db *sql.DB) (Study, error) {
	return summarize(db, func(Study) []int { return nil }, short)
}

// indexOf returns the index of a trial in the study. Trials are sorted by number.
func (r *loader) indexOf(number int) int {
	i, _ := slices.BinarySearchFunc(r.study.Trials, number, func(t Trial, n int) int { return t.Number - n })
	return i
}

// Nearest stands for the number of the trial that came nearest to the SLO. Of all failed probes of measured trials,
// this trial has the one with the most headroom. If headrooms are equal, the lowest rate decides. For each trial, the
// table trials has the headroom and the rate of the best failed probe, because reading all probes of a long study would
// take seconds.
const Nearest = -1

// withNearest replaces Nearest in a list of trial numbers by the number that it stands for. If no probe failed, it
// removes Nearest from the list.
func (r *loader) withNearest(numbers []int) ([]int, error) {
	i := slices.Index(numbers, Nearest)
	if i < 0 {
		return numbers, nil
	}
	numbers = slices.Clone(numbers)
	err := r.db.QueryRow(`SELECT number FROM trials WHERE outcome=? AND near_headroom IS NOT NULL
		ORDER BY near_headroom DESC, near_rps, number LIMIT 1`, trial.Measured).Scan(&numbers[i])
	if errors.Is(err, sql.ErrNoRows) {
		return slices.Delete(numbers, i, i+1), nil
	}
	return numbers, err
}

// loadStudy returns the study without its trials, or sql.ErrNoRows if the study was never begun.
func loadStudy(db *sql.DB) (Study, error) {
	r, err := readStudy(db)
	return r.study, err
}

// readStudy reads a study without its trials. After an error, the loader still has what it read before.
func readStudy(db *sql.DB) (*loader, error) {
	head, sums, err := readHead(db)
	r := &loader{db: db, sums: sums}
	if err == nil {
		r.schema, err = schemaVersion(db)
	}
	if err != nil {
		return r, err
	}
	r.study = Study{ID: head.text("id"), Name: head.text("name"), File: head.text("file"), State: State(head.text("state")),
		Note: head.text("note"), Commits: head.integer("commits")}
	r.study.Seed, err = strconv.ParseUint(head.text("seed"), 10, 64)
	if errors.Join(err, parseTime(head.text("created"), &r.study.Created), parseTime(head.text("updated"), &r.study.Updated)) != nil {
		return r, unreadableError(head)
	}
	for _, load := range []func() error{r.loadWorld, r.loadEvents, r.loadPriors, r.loadSpent} {
		if err := load(); err != nil {
			return r, err
		}
	}
	return r, nil
}

// unreadableError returns the error for a row with a meaningless value. The row's checksum is right, so the value was
// stored like that.
func unreadableError(r row) error { return damagedf("%s cannot be read: it has an invalid value", r) }

// readTable reads a whole table in the order of its keys, and checks that no row is missing.
func (r *loader) readTable(t *table, each func(row) error) error {
	var found rowSum
	err := t.read(r.db, short, "ORDER BY "+strings.Join(t.columns[:t.key], ", "), nil, func(one row) error {
		found = found.plus(one.sum())
		return each(one)
	})
	if err != nil {
		return err
	}
	return r.sums.check(t, found)
}

func (r *loader) loadEvents() error {
	changes, err := r.loadChanges()
	if err != nil {
		return err
	}
	err = r.readTable(eventsTable, func(one row) error {
		e := Event{Kind: one.text("kind"), Note: one.text("text"), Trial: int(one.integer("trial")), Changes: changes[one.integer("id")]}
		if parseTime(one.text("time"), &e.Time) != nil {
			return unreadableError(one)
		}
		r.study.Events = append(r.study.Events, e)
		return nil
	})
	r.study.Remedy = lastRemedy(r.study)
	return err
}

// lastRemedy returns the remedy that was stored with the study's last failure; "" if there is none.
func lastRemedy(study Study) string {
	if study.State != Failed {
		return ""
	}
	for _, e := range slices.Backward(study.Events) {
		switch e.Kind {
		case remedyEvent:
			return e.Note
		case string(Failed):
			return ""
		}
	}
	return ""
}

// splitRemedy splits the study's note into a note and a remedy, if the note ends with a remedy. Only older tuners
// stored such notes. The remedy is known from a trial that failed in the same way. No other code looks for a remedy in
// a text.
func splitRemedy(study *Study) {
	if study.State != Failed || study.Remedy != "" {
		return
	}
	for _, t := range study.Trials {
		remedy := serverctl.Remedy(t.Result.Class, t.Result.Cause)
		if note, found := strings.CutSuffix(study.Note, remedyMark+remedy); found && remedy != "" {
			study.Note, study.Remedy = note, remedy
			return
		}
	}
}

// readSummaries reads a study with the row of each trial. To read results and probes too would take ten times as long.
func readSummaries(db *sql.DB) (*loader, error) {
	r, err := readStudy(db)
	if err != nil {
		return r, err
	}
	err = r.readTable(trialsTable, func(one row) error {
		t, err := summaryOf(one)
		if err != nil {
			return err
		}
		if n := len(r.study.Trials); n > 0 && r.study.Trials[n-1].Number >= t.Number {
			return damagedf("trial %d comes after trial %d", t.Number, r.study.Trials[n-1].Number)
		}
		r.study.Trials, r.parts = append(r.study.Trials, t), append(r.parts, rowSum{one.integer("holds_rows"), one.integer("holds_sum")})
		return nil
	})
	discountAlikeDeaths(r.study.Trials)
	splitRemedy(&r.study)
	return r, err
}

// summaryOf returns a trial with the values that its row in table trials has.
func summaryOf(r row) (t Trial, err error) {
	t = Trial{Number: int(r.integer("number")), Origin: Origin(r.text("origin")), State: State(r.text("state")), Version: r.text("version")}
	err = errors.Join(decode(r.text("point"), &t.Point), decode(r.text("args"), &t.Args), parseTime(r.text("began"), &t.Began))
	if r.value("ended") != nil {
		err = errors.Join(err, parseTime(r.text("ended"), &t.Ended))
	}
	if err != nil {
		return t, unreadableError(r)
	}
	t.Result = trial.Result{
		Outcome: trial.Outcome(r.text("outcome")), Class: serverctl.Class(r.text("class")), Cause: serverctl.Cause(r.text("cause")),
		Evidence: r.text("evidence"), GPUTime: Seconds(r.real("gpu_seconds")),
		Capacity: capacity.Capacity{
			Rate: r.real("capacity_rps"), Low: r.real("passed_rps"), High: r.real("failed_rps"),
			Lowest: r.real("lowest_rps"), Highest: r.real("highest_rps"), StdErr: r.real("std_err"), Doubt: r.text("doubt"),
			Bound: capacity.Bound(r.text("bound")), Binding: r.text("binding"), InFlight: r.real("in_flight"),
		},
		Facts: serverctl.Facts{
			KVCacheTokens: int(r.integer("kv_tokens")), Simulated: r.integer("simulated") != 0, StartUp: Seconds(r.real("start_seconds")),
		},
	}
	if t.State == Done {
		t.Result.Facts.Version = t.Version
	}
	return t, nil
}

// Seconds converts seconds to a Duration, rounded to a microsecond. Up to a hundred years, a float64 of seconds is
// exact to a microsecond.
func Seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Microsecond)
}

// fill reads the results and probes that an SQL condition selects, and stores them in the given trials.
func (r *loader) fill(trials []Trial, columns probeColumns, condition string, args ...any) error {
	found := map[int]rowSum{}
	of := func(part row) (*Trial, error) {
		number := int(part.integer("trial"))
		i, ok := slices.BinarySearchFunc(trials, number, func(t Trial, n int) int { return t.Number - n })
		if !ok {
			return nil, damagedf("%s belongs to a trial that does not exist", part)
		}
		found[number] = found[number].plus(part.sum())
		return &trials[i], nil
	}
	err := resultsTable.read(r.db, short, condition, args, func(result row) error {
		t, err := of(result)
		if err != nil {
			return err
		}
		outcome, cause := t.Result.Outcome, t.Result.Cause // discountAlikeDeaths may have changed these; the stored result has the old values
		t.Result = trial.Result{}
		if decode(result.text("result"), &t.Result) != nil {
			return unreadableError(result)
		}
		t.Result.Outcome, t.Result.Cause = outcome, cause
		return nil
	})
	if err != nil {
		return err
	}
	err = probesTable.read(r.db, columns, condition+" ORDER BY trial, seq", args, func(probe row) error {
		t, err := of(probe)
		if err != nil {
			return err
		}
		parts, err := columns.rowIn(probe)
		if err != nil {
			return err
		}
		p, err := parts.probe()
		if err != nil {
			return unreadableError(probe)
		}
		t.Probes = append(t.Probes, p)
		return nil
	})
	if err != nil {
		return err
	}
	if err := r.checkFinished(trials, found); err != nil {
		return err
	}
	if slices.ContainsFunc(trials, func(t Trial) bool { return t.State != Done }) {
		return r.checkOpen()
	}
	return nil
}

// checkFinished checks that the results and probes of finished trials are complete.
func (r *loader) checkFinished(trials []Trial, found map[int]rowSum) error {
	for _, t := range trials {
		if t.State != Done {
			continue
		}
		what := fmt.Sprintf("trial %d, with its result and probes,", t.Number)
		if err := checkRows(r.parts[r.indexOf(t.Number)], found[t.Number], what); err != nil {
			return err
		}
	}
	return nil
}

// checkOpen checks that the probes of unfinished trials are complete.
func (r *loader) checkOpen() error {
	var found rowSum
	err := probesTable.read(r.db, short, "WHERE trial IN (SELECT number FROM trials WHERE state<>?)", []any{Done}, func(probe row) error {
		found = found.plus(probe.sum())
		return nil
	})
	if err != nil {
		return err
	}
	results, probes := r.sums[resultsTable.name], r.sums[probesTable.name]
	stored := rowSum{results.Rows + probes.Rows, results.Sum + probes.Sum}
	for i, t := range r.study.Trials {
		if t.State == Done {
			stored = stored.without(r.parts[i])
		}
	}
	return checkRows(stored, found, "the trial that is half done, with its probes,")
}
