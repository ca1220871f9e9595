package optuna

import (
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/samber/lo"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// Write writes the study into the SQLite file at path, which must be empty or not exist. The trials come one by one, so
// that they need not all be in memory. The trials in study.Trials need only points and results. Write writes the
// searched flags. It also writes the flags of earlier study files, which only older trials have.
//
// The objective is the capacity in requests per second, to be maximised. It is 0 if no rate kept the SLO. A world is
// all that must stay the same while trials are compared. A trial is:
//   - COMPLETE if it was measured in the world of the best trial,
//   - PRUNED if it was dropped, or measured in another world, so that Optuna does not compare it with the best trial,
//   - FAIL if it was infeasible or of unknown outcome,
//   - RUNNING if it is not finished.
//
// The intermediate values of a trial are the rates of its probes, in order. Times are UTC.
func Write(path string, study studies.Study, trials iter.Seq2[studies.Trial, error], searched []space.Parameter) (err error) {
	// Nobody reads the file before it is complete, so a journal on disk would protect nothing.
	db, err := open(path, "mode=rwc&_journal_mode=MEMORY&_synchronous=FULL")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	err = inTransaction(db, func(tx *sql.Tx) error {
		w := &writer{tx: tx, parameters: parametersOf(searched, study.Trials), worlds: study.WorldNumbers(), deciding: study.Deciding(), objective: study.DecidingObjective()}
		w.study(study)
		for t, err := range trials {
			if err != nil {
				return err
			}
			if w.trial(t); w.err != nil {
				break
			}
		}
		return w.err
	})
	if err != nil {
		return fmt.Errorf("write Optuna's tables: %w", err)
	}
	return nil
}

// A writer fills the tables. It keeps its first error and then writes nothing more.
type writer struct {
	tx         *sql.Tx
	parameters []space.Parameter
	worlds     map[int]int // number of the world, by trial number
	deciding   int         // number of the best trial's world
	objective  studies.Objective
	err        error
}

func (w *writer) run(query string, args ...any) {
	if w.err == nil {
		_, w.err = w.tx.Exec(query, args...)
	}
}

const studyID = 1 // the file has one study

// study creates the tables and writes everything but the trials.
func (w *writer) study(s studies.Study) {
	w.run(schema)
	w.run(`INSERT INTO alembic_version VALUES (?)`, revision)
	w.run(`INSERT INTO version_info VALUES (1, ?, ?)`, schemaVersion, libraryVersion)
	w.run(`INSERT INTO studies VALUES (?, ?)`, studyID, s.Name)
	w.run(`INSERT INTO study_directions VALUES (1, 'MAXIMIZE', ?, 0)`, studyID)
	for _, a := range studyAttributes(s) {
		w.run(`INSERT INTO study_user_attributes (study_id, "key", value_json) VALUES (?, ?, ?)`, studyID, a.key, w.json(a.value))
	}
}

// trial writes one trial. Optuna's ids count from 1.
func (w *writer) trial(t studies.Trial) {
	id, as := t.Number+1, w.stateOf(t)
	w.run(`INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?)`, id, t.Number, studyID, as, timeText(t.Began), timeText(t.Ended))
	if as == complete {
		w.run(`INSERT INTO trial_values (trial_id, objective, value, value_type) VALUES (?, 0, ?, ?)`, id, carried(t)/w.objective.Factor(t), finite)
	}
	illegal := map[string]string{}
	for i := range w.parameters {
		p := &w.parameters[i]
		text, given := t.Point[p.Name]
		if !given {
			continue
		}
		value, dist, ok := encodeParam(p, text)
		if !ok {
			illegal[p.Name] = text
			continue
		}
		w.run(`INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json) VALUES (?, ?, ?, ?)`, id, p.Name, value, w.json(dist))
	}
	for _, p := range t.Probes {
		w.run(`INSERT INTO trial_intermediate_values (trial_id, step, intermediate_value, intermediate_value_type) VALUES (?, ?, ?, ?)`, id, p.Seq, p.Rate, finite)
	}
	for _, a := range trialAttributes(t, w.worlds[t.Number], illegal) {
		w.run(`INSERT INTO trial_user_attributes (trial_id, "key", value_json) VALUES (?, ?, ?)`, id, a.key, w.json(a.value))
	}
}

func (w *writer) json(v any) string {
	text, err := json.Marshal(v)
	w.err = errors.Join(w.err, err)
	return string(text)
}

// timeText returns a time as SQLAlchemy writes it; nil for the zero time.
func timeText(t time.Time) any {
	if t.IsZero() {
		return nil
	}
	return t.UTC().Format("2006-01-02 15:04:05.000000")
}

// stateOf returns Optuna's state for a trial. Optuna takes its best value from all COMPLETE trials, so only trials of
// one world may be COMPLETE. Confirmations are not COMPLETE, because they have other requests and longer probes than
// the search.
func (w *writer) stateOf(t studies.Trial) state {
	if t.State != studies.Done {
		return running
	}
	switch t.Result.Outcome {
	case trial.Measured:
		if w.worlds[t.Number] != w.deciding || t.Origin == studies.Confirmed {
			return pruned
		}
		return complete
	case trial.Dropped:
		return pruned
	}
	return fail
}

// carried returns the capacity, or 0 if no rate kept the SLO. In that case Capacity.Rate is not 0, but the lowest rate
// that failed.
func carried(t studies.Trial) float64 {
	if !t.Met() {
		return 0
	}
	return t.Result.Capacity.Rate
}

// An attribute is a user attribute of a study or a trial in Optuna.
type attribute struct {
	key   string
	value any
}

func studyAttributes(s studies.Study) []attribute {
	objective := "capacity: the highest rate that keeps the SLO, requests per second"
	if s.DecidingObjective() == studies.CapacityPerGPU {
		objective = "capacity_per_gpu: the highest rate that keeps the SLO, divided by the number of GPUs, requests per second"
	}
	return []attribute{
		{"tuner_study_id", s.ID}, {"objective", objective},
		{"state", s.State}, {"note", s.Explanation()}, {"seed", fmt.Sprint(s.Seed)}, {"world", s.World}, {"worlds", s.Asked()}, {"file", s.File},
	}
}

// A probeAttribute sums up one probe.
type probeAttribute struct {
	Rate     float64 `json:"rate"`
	Pass     bool    `json:"pass"`
	Headroom float64 `json:"headroom"`
	Binding  string  `json:"binding"`
}

// trialAttributes returns the facts about a trial for which Optuna has no column. The illegalValues are the values of
// the point that are not among the choices.
func trialAttributes(t studies.Trial, world int, illegalValues map[string]string) []attribute {
	probes := lo.Map(t.Probes, func(p trial.Probe, _ int) probeAttribute {
		return probeAttribute{p.Rate, p.Verdict.Pass, p.Verdict.Headroom, p.Verdict.Binding}
	})
	all := []attribute{{"origin", t.Origin}, {"world", world}, {"args", append([]string{}, t.Args...)}, {"probes", probes}}
	if env := t.Point.Env(); env != nil {
		all = append(all, attribute{"env", env})
	}
	if len(illegalValues) > 0 {
		all = append(all, attribute{"not_among_choices", illegalValues})
	}
	if t.State != studies.Done {
		return all
	}
	r := t.Result
	all = append(all, attribute{"outcome", r.Outcome}, attribute{"gpu_seconds", r.GPUTime.Seconds()}, attribute{"simulated", r.Facts.Simulated})
	if r.Outcome != trial.Measured {
		return append(all, attribute{"class", r.Class}, attribute{"cause", r.Cause}, attribute{"evidence", r.Evidence})
	}
	c := r.Capacity
	return append(all, []attribute{
		{"capacity_rps", carried(t)}, {"bound", c.Bound}, {"binding", c.Binding}, {"passed_rps", c.Low}, {"failed_rps", c.High},
		{"lowest_rps", c.Lowest}, {"highest_rps", c.Highest}, {"std_err", c.StdErr}, {"in_flight", c.InFlight}, {"doubt", c.Doubt},
		{"notes", append([]string{}, r.Notes...)},
	}...)
}
