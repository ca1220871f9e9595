package studies

import (
	"database/sql"
	"fmt"
	"regexp"
	"strconv"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A prior is a trial of Study.Prior as it is stored, in JSON.
type prior struct {
	Point  space.Point   `json:"point"`
	Args   []string      `json:"args"`
	Probes []trial.Probe `json:"probes"`
	Result trial.Result  `json:"result"`
}

// A Source is a set of trials that were measured elsewhere. Only trials of the same Source may be compared with each
// other.
type Source struct {
	Path   string // the file or directory that was read
	World  int    // number of the world in the study at Path, from 1; 0 if Path has one world, or is no study
	Trials []Trial
}

// WorldSource returns the source name of one world of the study at a path; the first world is 1.
func WorldSource(path string, world int) string { return fmt.Sprintf("%s, world %d", path, world) }

// name returns the source's name, which its trials have in Trial.Source.
func (s Source) name() string {
	if s.World == 0 {
		return s.Path
	}
	return WorldSource(s.Path, s.World)
}

// AddPriors stores the trials of the sources as priors. They replace all earlier priors from the same paths. Of each
// trial, it stores Point, Args, Probes and Result. On an error it changes nothing.
func (s *Store) AddPriors(sources []Source) error {
	return s.write("add what was measured elsewhere", true, func(tx *transaction) error {
		s.rebase = true // a delta has no priors, so the next snapshot must be a base
		for _, source := range sources {
			for _, old := range tx.rows(sourcesTable, "WHERE path=?", source.Path) {
				tx.remove(priorsTable, "WHERE source=?", old.text("name"))
				tx.remove(sourcesTable, "WHERE name=?", old.text("name"))
			}
		}
		for _, source := range sources {
			tx.insertSource(source)
			for i, t := range source.Trials {
				text, err := encodePrior(t)
				if err != nil {
					return fmt.Errorf("add the trials of %s: trial %d: %w", source.name(), i, err)
				}
				tx.insert(priorsTable, []any{tx.nextID(priorsTable), source.name(), text})
			}
			addEvent(tx, "prior", fmt.Sprintf("%s from %s", render.Count(len(source.Trials), "trial"), source.name()))
		}
		return nil
	})
}

func (t *transaction) insertSource(s Source) {
	t.insert(sourcesTable, []any{s.name(), s.Path, sql.NullInt64{Int64: int64(s.World), Valid: s.World > 0}})
}

// worldSource matches the names that WorldSource returns.
var worldSource = regexp.MustCompile(`^(.*), world ([0-9]+)$`)

// splitSources migrates the sources of older schemas. Before schema 5, only a source's name had its path and world. Now
// each is stored as a value of its own.
func (t *transaction) splitSources() error {
	known := map[string]bool{}
	for _, prior := range t.rows(priorsTable, "ORDER BY id") {
		name := prior.text("source")
		if known[name] {
			continue
		}
		known[name] = true
		source := Source{Path: name}
		if m := worldSource.FindStringSubmatch(name); m != nil {
			source.Path = m[1]
			source.World, _ = strconv.Atoi(m[2]) // they are digits
		}
		t.insertSource(source)
	}
	return t.err
}

// CheckPrior returns an error for a trial that cannot be stored, because a number in it is NaN or infinite.
func CheckPrior(t Trial) error {
	_, err := encodePrior(t)
	return err
}

// encodePrior returns a trial from elsewhere as it is stored.
func encodePrior(t Trial) (string, error) {
	if t.Point == nil {
		t.Point = space.Point{}
	}
	return encode(prior{t.Point, t.Args, t.Probes, t.Result})
}

func (r *loader) loadPriors() error {
	if r.schema >= hasChanges { // priors have the names of their sources; this checks that no source is missing
		if err := r.all(sourcesTable, func(row) error { return nil }); err != nil {
			return err
		}
	}
	return r.all(priorsTable, func(one row) error {
		var p prior
		if decode(one.text("trial"), &p) != nil {
			return unreadable(one)
		}
		r.study.Prior = append(r.study.Prior, Trial{Number: -1, Origin: Prior, Source: one.text("source"), State: Done,
			Point: p.Point, Args: p.Args, Probes: p.Probes, Result: p.Result})
		return nil
	})
}
