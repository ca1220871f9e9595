package studies

import (
	"cmp"
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

// A reading is a study being read. It checks each row against its checksum, and each table against the sums in the
// study's row.
type reading struct {
	db      *sql.DB
	schema  int
	study   Study
	holds   holdings
	parts   []holding // rows and sum of the result and probes of each finished trial
	nearest near
}

// load reads the whole study.
func load(db *sql.DB) (Study, error) {
	r, err := readSummaries(db)
	if err != nil {
		return Study{}, err
	}
	if err := r.fill(r.study.Trials, long, ""); err != nil {
		return Study{}, err
	}
	discountAlikeDeaths(r.study.Trials)
	return r.study, nil
}

// summarize reads the columns of all trials. Of the trials that whole returns, it reads results and probes too.
func summarize(db *sql.DB, whole func(Study) []int, columns probeColumns) (Study, error) {
	r, err := readSummaries(db)
	if err != nil {
		return Study{}, err
	}
	discountAlikeDeaths(r.study.Trials)
	numbers := r.withNearest(whole(r.study))
	if len(numbers) == 0 {
		return r.study, nil
	}
	var trials []Trial
	for i := range r.study.Trials {
		if slices.Contains(numbers, r.study.Trials[i].Number) {
			trials = append(trials, r.study.Trials[i])
		}
	}
	marks := "(" + strings.Repeat("?,", len(numbers)-1) + "?)"
	args := make([]any, len(numbers))
	for i, n := range numbers {
		args[i] = n
	}
	if err := r.fill(trials, columns, "WHERE trial IN "+marks, args...); err != nil {
		return Study{}, err
	}
	for _, t := range trials {
		i := r.indexOf(t.Number)
		r.study.Trials[i] = t.as(r.study.Trials[i])
	}
	return r.study, nil
}

// indexOf returns the index of a trial in the study. Trials are sorted by number.
func (r *reading) indexOf(number int) int {
	i, _ := slices.BinarySearchFunc(r.study.Trials, number, func(t Trial, n int) int { return t.Number - n })
	return i
}

// Nearest stands for the number of the trial that came nearest to the SLO. It is the measured trial whose failed probe
// has the most headroom, and among equals the lowest rate. Columns of the trials have these values, because reading all
// probes of a long study would take seconds.
const Nearest = -1

// withNearest replaces Nearest by the number of that trial, or removes it if no probe failed.
func (r *reading) withNearest(numbers []int) []int {
	i := slices.Index(numbers, Nearest)
	if i < 0 {
		return numbers
	}
	numbers = slices.Clone(numbers)
	if !r.nearest.found {
		return slices.Delete(numbers, i, i+1)
	}
	numbers[i] = r.nearest.number
	return numbers
}

// A near is the trial with the failed probe nearest to the SLO.
type near struct {
	found          bool
	number         int
	headroom, rate float64
}

// or returns the nearer of n and a trial's row. Trials must come in the order of their numbers.
func (n near) or(row cells) near {
	if trial.Outcome(row.text(trialOutcome)) != trial.Measured || row[trialNearHeadroom] == nil {
		return n
	}
	is := near{true, int(row.integer(trialNumber)), row.real(trialNearHeadroom), row.real(trialNearRate)}
	if n.found && cmp.Or(-cmp.Compare(is.headroom, n.headroom), cmp.Compare(is.rate, n.rate)) >= 0 {
		return n
	}
	return is
}

// loadStudy returns the study without its trials, or sql.ErrNoRows when it was never begun.
func loadStudy(db *sql.DB) (Study, error) {
	r, err := readStudy(db)
	if err != nil {
		return Study{}, err
	}
	return r.study, nil
}

func readStudy(db *sql.DB) (*reading, error) {
	head, holds, err := readHead(db)
	if err != nil {
		return nil, err
	}
	column := func(name string) string { return head.text(studiesTable.column(name)) }
	r := &reading{db: db, holds: holds}
	if r.schema, err = schemaVersion(db); err != nil {
		return nil, err
	}
	r.study = Study{ID: column("id"), Name: column("name"), File: column("file"), State: State(column("state")), Note: column("note"),
		Commits: head.integer(studiesTable.column("commits"))}
	r.study.Seed, err = strconv.ParseUint(column("seed"), 10, 64)
	if errors.Join(err, parseTime(column("created"), &r.study.Created), parseTime(column("updated"), &r.study.Updated)) != nil {
		return nil, unreadable(studiesTable, head)
	}
	for _, load := range []func() error{r.loadWorld, r.loadEvents, r.loadPriors} {
		if err := load(); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// unreadable is the error for a row with a meaningless value. The row's checksum is right, so it was stored with that
// value.
func unreadable(t *table, row cells) error {
	return damagedf("%s cannot be read: it has an invalid value", t.named(row))
}

// all reads a whole table in the order of its keys, and checks that no row is missing.
func (r *reading) all(t *table, each func(cells) error) error {
	var found holding
	err := t.read(r.db, "", "ORDER BY "+strings.Join(t.columns[:t.key], ", "), nil, func(row cells) error {
		found = found.plus(t.sumOf(row))
		return each(row)
	})
	if err != nil {
		return err
	}
	return r.holds.check(t, found)
}

func (r *reading) loadEvents() error {
	changes, err := r.loadChanges()
	if err != nil {
		return err
	}
	return r.all(eventsTable, func(row cells) error {
		e := Event{Kind: row.text(2), Note: row.text(3), Trial: int(row.integer(4)), Changes: changes[row.integer(0)]}
		if parseTime(row.text(1), &e.Time) != nil {
			return unreadable(eventsTable, row)
		}
		r.study.Events = append(r.study.Events, e)
		return nil
	})
}

// readSummaries reads a study with the columns of all trials. Whole trials would take ten times as long.
func readSummaries(db *sql.DB) (*reading, error) {
	r, err := readStudy(db)
	if err != nil {
		return nil, err
	}
	about := r.holds[trialsTable.name].Rows
	if about < 0 || about > 1<<20 { // only a hint
		about = 0
	}
	r.study.Trials, r.parts = slices.Grow(r.study.Trials, int(about)), slices.Grow(r.parts, int(about))
	err = r.all(trialsTable, func(row cells) error {
		t, err := summaryOf(row)
		if err != nil {
			return err
		}
		if n := len(r.study.Trials); n > 0 && r.study.Trials[n-1].Number >= t.Number {
			return damagedf("trial %d comes after trial %d", t.Number, r.study.Trials[n-1].Number)
		}
		r.nearest = r.nearest.or(row)
		r.study.Trials, r.parts = append(r.study.Trials, t), append(r.parts, holding{row.integer(trialHoldsRows), row.integer(trialHoldsSum)})
		return nil
	})
	return r, err
}

// The indexes of the trials' columns, looked up once for ten thousand trials.
var (
	trialNumber, trialOrigin, trialPoint, trialArgs    = trialColumn("number"), trialColumn("origin"), trialColumn("point"), trialColumn("args")
	trialStateAt, trialBegan, trialEnded, trialVersion = trialColumn("state"), trialColumn("began"), trialColumn("ended"), trialColumn("version")
	trialOutcome, trialClass, trialCause, trialWhy     = trialColumn("outcome"), trialColumn("class"), trialColumn("cause"), trialColumn("evidence")
	trialRate, trialLow, trialHigh                     = trialColumn("capacity_rps"), trialColumn("passed_rps"), trialColumn("failed_rps")
	trialLowest, trialHighest, trialStdErr             = trialColumn("lowest_rps"), trialColumn("highest_rps"), trialColumn("std_err")
	trialDoubt, trialBound, trialBinding               = trialColumn("doubt"), trialColumn("bound"), trialColumn("binding")
	trialInFlight, trialTokens, trialGPU               = trialColumn("in_flight"), trialColumn("kv_tokens"), trialColumn("gpu_seconds")
	trialSimulated, trialStart                         = trialColumn("simulated"), trialColumn("start_seconds")
	trialHoldsRows, trialHoldsSum                      = trialColumn("holds_rows"), trialColumn("holds_sum")
	trialNearRate, trialNearHeadroom                   = trialColumn("near_rps"), trialColumn("near_headroom")
)

func trialColumn(column string) int { return trialsTable.column(column) }

// summaryOf returns a trial with what its row has.
func summaryOf(row cells) (t Trial, err error) {
	t = Trial{Number: int(row.integer(trialNumber)), Origin: Origin(row.text(trialOrigin)), State: State(row.text(trialStateAt)), Version: row.text(trialVersion)}
	err = errors.Join(decodeMap(row.text(trialPoint), (*map[string]string)(&t.Point)), decodeList(row.text(trialArgs), &t.Args), parseTime(row.text(trialBegan), &t.Began))
	if row[trialEnded] != nil {
		err = errors.Join(err, parseTime(row.text(trialEnded), &t.Ended))
	}
	if err != nil {
		return t, unreadable(trialsTable, row)
	}
	r := &t.Result
	r.Outcome, r.Class = trial.Outcome(row.text(trialOutcome)), serverctl.Class(row.text(trialClass))
	r.Cause, r.Evidence = serverctl.Cause(row.text(trialCause)), row.text(trialWhy)
	r.GPUTime = seconds(row.real(trialGPU))
	r.Capacity = capacity.Capacity{Rate: row.real(trialRate), Low: row.real(trialLow), High: row.real(trialHigh),
		Lowest: row.real(trialLowest), Highest: row.real(trialHighest), StdErr: row.real(trialStdErr),
		Doubt: row.text(trialDoubt), Bound: capacity.Bound(row.text(trialBound)), Binding: row.text(trialBinding), InFlight: row.real(trialInFlight)}
	r.Facts.KVCacheTokens, r.Facts.Simulated, r.Facts.StartUp = int(row.integer(trialTokens)), row.integer(trialSimulated) != 0, seconds(row.real(trialStart))
	if t.State == Done {
		r.Facts.Version = t.Version
	}
	return t, nil
}

// seconds rounds to a microsecond. A float64 of seconds is exact to a microsecond for a hundred years.
func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(time.Microsecond)
}

// fill reads the results and probes that where selects into trials.
func (r *reading) fill(trials []Trial, columns probeColumns, where string, args ...any) error {
	found := make([]holding, len(trials))
	of := func(t *table, row cells) (i int, err error) {
		i, ok := slices.BinarySearchFunc(trials, int(row.integer(t.column("trial"))), func(t Trial, n int) int { return t.Number - n })
		if !ok {
			return 0, damagedf("%s belongs to a trial that is not there", t.named(row))
		}
		found[i] = found[i].plus(t.sumOf(row))
		return i, nil
	}
	err := resultsTable.read(r.db, "", where, args, func(row cells) error {
		i, err := of(resultsTable, row)
		if err != nil {
			return err
		}
		trials[i].Result = trial.Result{}
		if decode(row.text(1), &trials[i].Result) != nil {
			return unreadable(resultsTable, row)
		}
		return nil
	})
	if err != nil {
		return err
	}
	err = probesTable.read(r.db, string(columns), where+" ORDER BY trial, seq", args, func(row cells) error {
		i, err := of(probesTable, row)
		if err != nil {
			return err
		}
		parts, err := columns.rowIn(row)
		if err != nil {
			return err
		}
		p, err := parts.probe()
		if err != nil {
			return unreadable(probesTable, row)
		}
		trials[i].Probes = append(trials[i].Probes, p)
		return nil
	})
	if err != nil {
		return err
	}
	return r.checkParts(trials, found)
}

// checkParts checks that the trials' results and probes are complete.
func (r *reading) checkParts(trials []Trial, found []holding) error {
	running := false
	for i, t := range trials {
		if t.State != Done {
			running = true
			continue
		}
		if err := checkRows(r.parts[r.indexOf(t.Number)], found[i], fmt.Sprintf("trial %d, with its result and probes,", t.Number)); err != nil {
			return err
		}
	}
	if !running {
		return nil
	}
	var open holding
	err := probesTable.read(r.db, "", "WHERE trial IN (SELECT number FROM trials WHERE state<>?)", []any{Done}, func(row cells) error {
		open = open.plus(probesTable.sumOf(row))
		return nil
	})
	if err != nil {
		return err
	}
	return r.checkOpen(open)
}

// checkOpen checks that the probes of unfinished trials are complete.
func (r *reading) checkOpen(found holding) error {
	results, probes := r.holds[resultsTable.name], r.holds[probesTable.name]
	stored := holding{results.Rows + probes.Rows, results.Sum + probes.Sum}
	for i, t := range r.study.Trials {
		if t.State == Done {
			stored = stored.without(r.parts[i])
		}
	}
	return checkRows(stored, found, "the trial that is half done, with its probes,")
}
