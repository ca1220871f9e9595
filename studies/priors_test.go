package studies

import (
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// Readers see priors with their sources, in the order of their import. Importing a source again replaces its priors.
func TestPriorsAreKeptBySource(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "study")
	store, _, err := Open(t.Context(), dir, New{Name: "study"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	of := func(seqs string, rate float64) Trial {
		return Trial{Number: 7, Origin: Sampled, Point: space.Point{"max-num-seqs": seqs}, Args: []string{"--max-num-seqs", seqs}, Probes: []trial.Probe{{Rate: rate}},
			Result: trial.Result{Outcome: trial.Measured, Capacity: capacity.Capacity{Rate: rate, Low: rate, Bound: capacity.AtLeast}}}
	}
	for _, add := range []struct {
		source string
		trials []Trial
	}{{"a", []Trial{of("1", 1), of("2", 2)}}, {"b", []Trial{of("3", 3)}}, {"a", []Trial{of("4", 4), {}}}} {
		if err := store.AddPriors([]Source{{Name: add.source, Path: add.source, Trials: add.trials}}); err != nil {
			t.Fatal(err)
		}
	}
	// Another time "c" may have other worlds, and all that is of it goes.
	for _, sources := range [][]Source{
		{{WorldSource("c", 2), "c", []Trial{of("5", 5)}}, {WorldSource("c", 1), "c", []Trial{of("6", 6)}}},
		{{"c", "c", []Trial{of("7", 7)}}, {"cc", "cc", []Trial{of("8", 8)}}},
		{{WorldSource("c", 3), "c", []Trial{of("9", 9)}}},
	} {
		if err := store.AddPriors(sources); err != nil {
			t.Fatal(err)
		}
	}
	// Of what cannot be stored nothing is.
	err = store.AddPriors([]Source{{"b", "b", []Trial{of("10", 10)}}, {"d", "d", []Trial{of("11", math.Inf(1))}}})
	if err == nil || !strings.Contains(err.Error(), "add what d holds: trial 0 of it: ") {
		t.Errorf("what cannot be stored: %v", err)
	}
	study, err := ReadSnapshot(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range study.Prior {
		if p.Number != -1 || p.Origin != Prior || p.State != Done {
			t.Errorf("a prior is %+v", p)
		}
		got = append(got, p.Source+" "+p.Point.String())
	}
	if want := []string{"b max-num-seqs=3", "a max-num-seqs=4", "a ", "cc max-num-seqs=8", "c, world 3 max-num-seqs=9"}; !slices.Equal(got, want) {
		t.Errorf("priors %q, want %q", got, want)
	}
	if first := study.Prior[0]; len(first.Probes) != 1 || first.Probes[0].Rate != 3 || !first.Met() || len(first.Args) != 2 || len(study.Trials) != 0 {
		t.Errorf("the first is %+v beside %d trials", first, len(study.Trials))
	}
}
