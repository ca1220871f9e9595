package studies

import (
	"fmt"
	"strconv"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A prior is the stored form of a trial of Study.Prior.
type prior struct {
	Point  space.Point   `json:"point"`
	Args   []string      `json:"args"`
	Probes []trial.Probe `json:"probes"`
	Result trial.Result  `json:"result"`
}

// A Source is a set of trials from elsewhere. They may be compared with each other only.
type Source struct {
	Name   string // for people: the Path, or its WorldSource
	Path   string // the file or directory that was read
	Trials []Trial
}

// ofWorld separates a study's path from the number of one of its worlds.
const ofWorld = ", world "

// WorldSource is the source name of one world of the study at a path; the first world is 1.
func WorldSource(path string, world int) string { return path + ofWorld + strconv.Itoa(world) }

// AddPriors replaces all priors from the same paths by these. On an error it changes nothing. It keeps each trial's Point, Args, Probes and
// Result.
func (s *Store) AddPriors(sources []Source) error {
	texts := make([][]string, len(sources))
	for i, source := range sources {
		for j, t := range source.Trials {
			text, err := encodePrior(t)
			if err != nil {
				return fmt.Errorf("add what %s holds: trial %d of it: %w", source.Name, j, err)
			}
			texts[i] = append(texts[i], text)
		}
	}
	return s.write("add what was measured elsewhere", true, func(tx *transaction) error {
		s.rebase = true // deltas have no priors
		for _, source := range sources {
			tx.remove(priorsTable, "WHERE source=?1 OR substr(source, 1, length(?2))=?2", source.Path, source.Path+ofWorld)
		}
		for i, source := range sources {
			for _, text := range texts[i] {
				tx.insert(priorsTable, []any{tx.nextID(priorsTable), source.Name, text})
			}
			addEvent(tx, "prior", fmt.Sprintf("%s from %s", render.Count(len(source.Trials), "trial"), source.Name))
		}
		return nil
	})
}

// CheckPrior returns an error for a trial that cannot be stored, because a number in it is NaN or infinite.
func CheckPrior(t Trial) error {
	_, err := encodePrior(t)
	return err
}

// encodePrior returns the stored form of a trial from elsewhere.
func encodePrior(t Trial) (string, error) {
	if t.Point == nil {
		t.Point = space.Point{}
	}
	return encode(prior{t.Point, t.Args, t.Probes, t.Result})
}

func (r *reading) loadPriors() error {
	return r.all(priorsTable, func(row cells) error {
		var p prior
		if decode(row.text(2), &p) != nil {
			return unreadable(priorsTable, row)
		}
		r.study.Prior = append(r.study.Prior, Trial{Number: -1, Origin: Prior, Source: row.text(1), State: Done, Point: p.Point, Args: p.Args, Probes: p.Probes, Result: p.Result})
		return nil
	})
}
