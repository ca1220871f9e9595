package studies

import (
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// A prior is the stored form of a trial in Study.Prior. It is stored as JSON.
type prior struct {
	Point  space.Point   `json:"point"`
	Args   []string      `json:"args"`
	Probes []trial.Probe `json:"probes"`
	Result trial.Result  `json:"result"`
}

// A Source is a set of trials that were measured elsewhere. Only trials of the same Source may be compared with each
// other.
type Source struct {
	Path   string // the file or directory that was read; predictedPath for predictions
	World  int    // number of the world in the study at Path, from 1; 0 if Path has one world, or is no study
	Trials []Trial
}

// predictedPath is the Path of predictions. ImportPath makes sure that no import has this path.
const predictedPath = "the simulator"

// Predictions returns the source with what the simulator predicted for a world of the study; the first world is 1. The
// trials of the source are copies that know their source and their world.
func Predictions(world int, trials []Trial) Source {
	s := Source{Path: predictedPath, Trials: slices.Clone(trials)}
	if world > 1 {
		s.World = world
	}
	for i := range s.Trials {
		s.Trials[i].Source, s.Trials[i].PredictedFor = s.Name(), s.predictedFor()
	}
	return s
}

// predictedFor returns the world for which the source was predicted; 0 if its trials were measured.
func (s Source) predictedFor() int {
	if s.Path != predictedPath {
		return 0
	}
	return max(1, s.World)
}

// ImportPath returns a path as the Path of an imported source. It changes only a path that could be taken for a source of
// predictions.
func ImportPath(path string) string {
	if path == predictedPath || strings.HasPrefix(path, predictedPath+", world ") {
		return "./" + path
	}
	return path
}

// WorldSource returns the source name of one world of the study at a path; the first world is 1.
func WorldSource(path string, world int) string { return fmt.Sprintf("%s, world %d", path, world) }

// Name returns the source's name, which its trials have in Trial.Source.
func (s Source) Name() string {
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
					return fmt.Errorf("add the trials of %s: trial %d: %w", source.Name(), i, err)
				}
				tx.insert(priorsTable, []any{tx.nextID(priorsTable), source.Name(), text})
			}
			what := "trial"
			if source.predictedFor() > 0 {
				what = "prediction"
			}
			addEvent(tx, "prior", fmt.Sprintf("%s from %s", render.Count(len(source.Trials), what), source.Name()))
		}
		return nil
	})
}

func (t *transaction) insertSource(s Source) {
	t.insert(sourcesTable, []any{s.Name(), s.Path, sql.NullInt64{Int64: int64(s.World), Valid: s.World > 0}})
}

// worldSource matches the names that WorldSource returns.
var worldSource = regexp.MustCompile(`^(.*), world ([0-9]+)$`)

// sourceNamed returns the source with a name, without its trials. It is for schemas before 5, where a source's path and
// world were only parts of its name.
func sourceNamed(name string) Source {
	source := Source{Path: name}
	if m := worldSource.FindStringSubmatch(name); m != nil {
		source.Path = m[1]
		source.World, _ = strconv.Atoi(m[2]) // cannot fail, because the text has only digits
	}
	return source
}

// splitSources migrates the sources of schemas before 5. Now the path and the world are stored as values of their own.
func (t *transaction) splitSources() error {
	known := map[string]bool{}
	for _, prior := range t.rows(priorsTable, "ORDER BY id") {
		name := prior.text("source")
		if known[name] {
			continue
		}
		known[name] = true
		t.insertSource(sourceNamed(name))
	}
	return t.err
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

func (r *loader) loadPriors() error {
	sources := map[string]Source{} // by name; empty before schema 5
	if r.schema >= hasChanges {
		err := r.readTable(sourcesTable, func(one row) error {
			sources[one.text("name")] = Source{Path: one.text("path"), World: int(one.integer("world"))}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return r.readTable(priorsTable, func(one row) error {
		var p prior
		if decode(one.text("trial"), &p) != nil {
			return unreadableError(one)
		}
		name := one.text("source")
		source, known := sources[name]
		if !known {
			source = sourceNamed(name)
		}
		r.study.Prior = append(r.study.Prior, Trial{Number: -1, Origin: Prior, Source: name, PredictedFor: source.predictedFor(), State: Done,
			Point: p.Point, Args: p.Args, Probes: p.Probes, Result: p.Result})
		return nil
	})
}
