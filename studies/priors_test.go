package studies

import (
	"errors"
	"maps"
	"math"
	"path/filepath"
	"slices"
	"testing"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// Readers see priors with their sources, in the order of their import. Another import from the same path replaces its
// priors.
func TestAddPriors(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "study")
	store := open(t, dir)
	of := func(seqs string, rate float64) Trial {
		return Trial{Number: 7, Origin: Sampled, Point: space.Point{"max-num-seqs": seqs}, Args: []string{"--max-num-seqs", seqs}, Probes: []trial.Probe{{Rate: rate}},
			Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, Bound: capacity.AtLeast}}}
	}
	for _, add := range []struct {
		source string
		trials []Trial
	}{{"a", []Trial{of("1", 1), of("2", 2)}}, {"b", []Trial{of("3", 3)}}, {"a", []Trial{of("4", 4), {}}}} {
		try(t, store.AddPriors([]Source{{Path: add.source, Trials: add.trials}}))
	}
	// At the next import, a study may have other worlds. The priors of all its earlier worlds are replaced, and the
	// priors from other paths stay.
	for _, sources := range [][]Source{
		{{"c", 2, []Trial{of("5", 5)}}, {"c", 1, []Trial{of("6", 6)}}},
		{{"c", 0, []Trial{of("7", 7)}}, {"c, worldwide", 0, []Trial{of("8", 8)}}},
		{{"c", 3, []Trial{of("9", 9)}}},
	} {
		try(t, store.AddPriors(sources))
	}
	// If one trial cannot be stored, no trial of that import is stored.
	infinite := []Source{{"b", 0, []Trial{of("10", 10)}}, {"d", 0, []Trial{of("11", math.Inf(1))}}}
	wantError(t, store.AddPriors(infinite), "add the trials of d: trial 0: ")
	study, err := ReadSnapshot(dir)
	try(t, err)
	var got []string
	for _, p := range study.Prior {
		if p.Number != -1 || p.Origin != Prior || p.State != Done {
			t.Errorf("a prior = %+v", p)
		}
		got = append(got, p.Source+" "+p.Point.String())
	}
	if want := []string{"b max-num-seqs=3", "a max-num-seqs=4", "a ", "c, worldwide max-num-seqs=8", "c, world 3 max-num-seqs=9"}; !slices.Equal(got, want) {
		t.Errorf("the priors are %q, want %q", got, want)
	}
	if first := study.Prior[0]; len(first.Probes) != 1 || first.Probes[0].Rate != 3 || !first.Met() || len(first.Args) != 2 || len(study.Trials) != 0 {
		t.Errorf("the first prior is %+v, beside %d trials", first, len(study.Trials))
	}
}

// Readers know which priors were predicted, and for which world. An import from a folder with the name of the simulator
// was measured, and stays beside the predictions.
func TestPredictedPriors(t *testing.T) {
	for _, path := range []string{"a", "the simulator, worldwide", "/the simulator", "./the simulator"} {
		if got := ImportPath(path); got != path {
			t.Errorf("ImportPath(%q) = %q, want no change", path, got)
		}
	}
	s := open(t, filepath.Join(t.TempDir(), "study"))
	imported := []Source{{Path: ImportPath("the simulator"), Trials: []Trial{{}}}, {Path: ImportPath("the simulator, world 2"), Trials: []Trial{{}}}}
	for world := 1; world <= 3; world++ {
		try(t, s.AddPriors([]Source{Predictions(world, []Trial{{Number: -1}})}), s.AddPriors(imported))
		wantPredicted(t, s, map[string]int{Predictions(world, nil).Name(): world, "./the simulator": 0, "./the simulator, world 2": 0})
	}
	if of := Predictions(2, []Trial{{Number: -1}}).Trials[0]; !of.Predicted() || of.PredictedFor != 2 || of.Source != "the simulator, world 2" {
		t.Errorf("a prediction for world 2 is %+v", of)
	}
}

// wantPredicted checks PredictedFor of the stored priors, by the names of their sources.
func wantPredicted(t *testing.T, s *Store, want map[string]int) {
	t.Helper()
	study, err := s.Study()
	try(t, err)
	got := map[string]int{}
	for _, p := range study.Prior {
		got[p.Source] = p.PredictedFor
		if p.Predicted() != (p.PredictedFor > 0) {
			t.Errorf("Predicted() = %t of a prior from %s", p.Predicted(), p.Source)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("the priors were predicted for the worlds %v, want %v", got, want)
	}
}

// Studies of older tuners have only the path, or before schema 5 only the name, to show what was predicted.
func TestPredictedPriorsOfOlderTuners(t *testing.T) {
	for _, row := range []struct {
		name  string
		store func(*transaction)
		want  int
	}{
		{"the simulator", func(tx *transaction) { tx.insert(sourcesTable, []any{"the simulator", "the simulator", nil}) }, 1},
		{"the simulator, world 3", func(tx *transaction) { tx.insert(sourcesTable, []any{"the simulator, world 3", "the simulator", 3}) }, 3},
		{"the simulator, world 2", func(tx *transaction) {
			tx.insert(sourcesTable, []any{"the simulator, world 2", "the simulator, world 2", nil})
		}, 0},
		{"the simulator", func(tx *transaction) { tx.err = tx.splitSources() }, 1},
		{"the simulator, world 2", func(tx *transaction) { tx.err = tx.splitSources() }, 2},
		{"the simulators", func(tx *transaction) { tx.err = tx.splitSources() }, 0},
	} {
		s := open(t, filepath.Join(t.TempDir(), "study"))
		try(t, s.commit("insert a prior as an older tuner did", func(tx *transaction) error {
			text, err := encodePrior(Trial{})
			tx.insert(priorsTable, []any{tx.nextID(priorsTable), row.name, text})
			row.store(tx)
			return err
		}))
		wantPredicted(t, s, map[string]int{row.name: row.want})
	}
}

// Before schema 5, only a source's name had its path and world. The migration reads both from the name, so that an
// import replaces these priors too.
func TestSourcesOfOlderSchemas(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "study")
	s := open(t, dir)
	err := s.commit("insert priors as schema 4 did", func(tx *transaction) error {
		text, err := encodePrior(Trial{})
		for _, name := range []string{"c, world 2", "c, world 2", "c, world 1", "c, worldwide", "c"} {
			tx.insert(priorsTable, []any{tx.nextID(priorsTable), name, text})
		}
		return errors.Join(err, tx.splitSources())
	})
	try(t, err, s.AddPriors([]Source{{Path: "c", World: 3, Trials: []Trial{{}}}}))
	study, err := ReadSnapshot(dir)
	try(t, err)
	if len(study.Prior) != 2 || study.Prior[0].Source != "c, worldwide" || study.Prior[1].Source != "c, world 3" {
		t.Errorf("the priors are %+v, want one from c, worldwide and one from c, world 3", study.Prior)
	}
}
