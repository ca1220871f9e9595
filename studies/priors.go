package studies

import (
	"fmt"
	"strconv"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A prior is what is stored of a Trial of Study.Prior.
type prior struct {
	Point  space.Point   `json:"point"`
	Args   []string      `json:"args"`
	Probes []trial.Probe `json:"probes"`
	Result trial.Result  `json:"result"`
}

// A Source is what was measured elsewhere and is to be compared with itself alone.
type Source struct {
	Name   string // that a person knows it by: the Path, or a WorldSource of it
	Path   string // what it was read from, such as a file
	Trials []Trial
}

// ofWorld stands between the path of a study and the number of one of its worlds.
const ofWorld = ", world "

// WorldSource is the name of what a study at a path measured in one of its worlds, from 1.
func WorldSource(path string, world int) string { return path + ofWorld + strconv.Itoa(world) }

// AddPriors stores what was measured elsewhere, in the place of all that came from the same paths before: all of it, or on an error nothing. Of each
// trial its Point, Args, Probes and Result are kept.
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
		s.rebase = true // deltas know nothing of priors
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

// CheckPrior says what of a trial that was measured elsewhere cannot be stored: a number that is none.
func CheckPrior(t Trial) error {
	_, err := encodePrior(t)
	return err
}

// encodePrior is what is stored of a trial that was measured elsewhere.
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
