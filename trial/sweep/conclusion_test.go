package sweep

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/slo"
)

// rowLetters stand for verdicts: p is passed, f is failed. L passed and l failed while the load generator was late.
const rowLetters = "pfLl"

// A table has one verdict for each load. Its methods compute the expected conclusions without the code under test.
type table struct {
	loads   []float64
	letters []byte
}

func (t table) loadsWith(letters string) (loads []float64) {
	for i, l := range t.letters {
		if strings.IndexByte(letters, l) >= 0 {
			loads = append(loads, t.loads[i])
		}
	}
	slices.Sort(loads)
	return loads
}

// highest returns the highest load that passed while the load generator was in time; 0 means none.
func (t table) highest() float64 { return slices.Max(append(t.loadsWith("p"), 0)) }

// reach returns the highest load that kept the SLO, or may keep it when the load generator is in time; 0 means none.
func (t table) reach() float64 {
	reach := t.highest()
	for _, load := range t.loadsWith("Ll") {
		failed := slices.ContainsFunc(t.loadsWith("f"), func(f float64) bool { return f > t.highest() && f <= load })
		if !failed {
			reach = max(reach, load)
		}
	}
	return reach
}

func (t table) String() string {
	words := make([]string, len(t.loads))
	for i := range t.loads {
		words[i] = fmt.Sprintf("%g%c", t.loads[i], t.letters[i])
	}
	return strings.Join(words, " ")
}

func randomTable(rng *rand.Rand, loads []float64) table {
	t := table{loads: loads}
	for range loads {
		t.letters = append(t.letters, rowLetters[rng.IntN(len(rowLetters))])
	}
	return t
}

func (t table) steps() (steps []capacity.Step) {
	for i, load := range t.loads {
		s := capacity.Step{Rate: load, Outcome: capacity.Outcome{Pass: strings.IndexByte("pL", t.letters[i]) >= 0, Binding: "p99 TTFT"}}
		if strings.IndexByte("lL", t.letters[i]) >= 0 {
			s.Limited = "the load generator was 17.5 ms late at p99"
		}
		steps = append(steps, s)
	}
	return steps
}

// figures returns the number in each match of a regular expression.
func figures(t *testing.T, text, pattern string) (all []float64) {
	t.Helper()
	for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
		f, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, f)
	}
	return all
}

// The conclusion and the error of `tuner bench` must agree with its rows, for any order of the loads.
func TestWhatBenchConcludesFollowsFromTheRows(t *testing.T) {
	t.Parallel()
	for seed := range uint64(4000) {
		rng := rand.New(rand.NewPCG(seed, 2))
		var loads []float64
		for range 1 + rng.IntN(6) {
			loads = append(loads, float64(1+rng.IntN(40)))
		}
		slices.Sort(loads)
		loads = slices.Compact(loads)
		rng.Shuffle(len(loads), func(i, j int) { loads[i], loads[j] = loads[j], loads[i] })
		rows := randomTable(rng, loads)
		var out bytes.Buffer
		report := &loadtest.Report{Out: &out, Format: loadtest.FormatText, Bench: &loadtest.Bench{SLO: &slo.SLO{}, Runs: make([]loadtest.Run, 2)}}
		err := report.Finish(rows.steps())
		text := strings.Join(strings.Fields(out.String()), " ")
		wrong := func(what string) { t.Fatalf("%s: %s; %v: %s", rows, text, err, what) }
		if kept := rows.highest() > 0; errors.Is(err, loadtest.ErrNoRunKept) == kept || (err == nil) != kept {
			wrong("the error does not follow from the rows")
		}
		if strings.Contains(fmt.Sprint(err), "load generator") != (rows.highest() == 0 && len(rows.loadsWith("Ll")) > 0) {
			wrong("the error does not say what decided")
		}
		for _, load := range figures(t, text, `([0-9.]+) req/s is the highest within the SLO`) {
			if load != rows.highest() || rows.reach() > load {
				wrong("it is not the highest")
			}
		}
		for _, load := range figures(t, text, `([0-9.]+) req/s is within the SLO, and may not be the highest`) {
			if load != rows.highest() || rows.reach() == load {
				wrong("it passed, and no higher load is undecided")
			}
		}
		for _, load := range figures(t, text, `failed at the lowest load, ([0-9.]+),`) {
			if fails := rows.loadsWith("f"); rows.highest() > 0 || load != fails[0] || rows.reach() > 0 {
				wrong("it is not the lowest, or lower ones may pass")
			}
		}
		for _, load := range figures(t, text, `passed at the highest load, ([0-9.]+)`) {
			if load != slices.Max(loads) && rows.reach() > load {
				wrong("it is not the highest load")
			}
		}
		for _, load := range figures(t, text, `the next load of the grid, ([0-9.]+), failed`) {
			if !slices.Contains(rows.loadsWith("f"), load) || load < rows.highest() {
				wrong("it did not fail")
			}
		}
		var below []float64
		for _, load := range rows.loadsWith("f") {
			if load < rows.highest() {
				below = append(below, load)
			}
		}
		if got := figures(t, text, `but ([0-9.]+) req/s failed`); !slices.Equal(got, below) {
			wrong(fmt.Sprintf("below the highest %v failed", below))
		}
		_, late, _ := strings.Cut(text, "not decided at ")
		if got := figures(t, late, `([0-9.]+) \(the load`); !slices.Equal(got, rows.loadsWith("Ll")) {
			wrong("these are not the loads at which the generator was late")
		}
	}
}

// The conclusion of a sweep must be true for every possible result of the loads at which the load generator was late.
func TestWhatASweepConcludesFollowsFromTheRows(t *testing.T) {
	t.Parallel()
	said := map[string]int{}
	whole := swept("ppp", "ppp", "ppp", "ppp")
	for seed := range uint64(4000) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var all []table
		var letters []string
		for range 1 + rng.IntN(4) {
			one := randomTable(rng, []float64{1, 2, 4})
			if rng.IntN(2) == 0 { // in half of the tables the load generator is never late
				one.letters = []byte(strings.NewReplacer("L", "p", "l", "f").Replace(string(one.letters)))
			}
			all, letters = append(all, one), append(letters, string(one.letters))
		}
		s := *whole
		s.Configs = slices.Clone(whole.Configs[:len(letters)])
		s.setRows(letters...)
		c := s.compare()
		text, results := c.conclusion(), c.all
		others := func(i int, reach func(float64) bool) bool {
			for j, one := range all {
				if j != i && !reach(one.reach()) {
					return false
				}
			}
			return true
		}
		wrong := func(what string) { t.Fatalf("%q: %s: %s", letters, text, what) }
		for i, r := range results {
			top := all[i].highest()
			switch {
			case r.mark == "winner" && !others(i, func(r float64) bool { return r < top }):
				wrong("another may reach the winner")
			case r.mark == "tie" && (all[i].reach() > top || !others(i, func(r float64) bool { return r <= top })):
				wrong("one of the tied may be higher")
			case r.versus() != "-" && (all[i].reach() != top || all[0].reach() != all[0].highest()):
				wrong("a difference between loads that are not known")
			case strings.Contains(r.versus(), "-0"):
				wrong("a difference of -0")
			}
		}
		for _, claim := range []struct {
			words string
			holds bool
		}{
			{"No config reaches the baseline", len(all) > 1 && others(0, func(r float64) bool { return r < all[0].highest() })},
			{"No config kept the SLO", others(-1, func(r float64) bool { return r == 0 })},
			{"baseline kept the SLO at no load", all[0].reach() == 0},
			{"alone reaches", slices.ContainsFunc(results, func(r configResult) bool { return r.mark == "winner" })},
			{"above the baseline", slices.ContainsFunc(all, func(o table) bool { return o.highest() > all[0].reach() })},
			{"tie at", true},
			{"No winner can be named", slices.ContainsFunc(all, func(o table) bool { return o.reach() > o.highest() })},
		} {
			if strings.Contains(text, claim.words) {
				said[claim.words]++
				if !claim.holds {
					wrong("it does not hold")
				}
			}
		}
	}
	if len(said) < 7 {
		t.Errorf("only these conclusions occurred, want all seven: %v", said)
	}
}
