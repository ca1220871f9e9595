package searchbench

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"vllmtuner/tuner/space"
)

// These are the defaults for the settings of a run, which come from the environment. With the defaults, a run takes
// about ten minutes on two cores.
const (
	defaultWorlds  = "^(h200-phase1|other)$"
	defaultMethods = "^(study-.*|optuna-tpe)$"
	defaultSeeds   = 4
	defaultTrials  = 16 // as in `tuner init`
	defaultRivals  = 30 // trials of the other methods: each of their users chooses the number
)

func setting(t *testing.T, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s is not a number above 0", name, text)
	}
	return n
}

// chosenWorlds returns the worlds that SEARCH_WORLDS names, and a random world for each seed in SEARCH_RANDOM.
func chosenWorlds(t *testing.T) (chosen []world) {
	t.Helper()
	worlds, err := namedWorlds()
	if err != nil {
		t.Fatal(err)
	}
	wanted := regexp.MustCompile(cmp.Or(os.Getenv("SEARCH_WORLDS"), defaultWorlds))
	for _, w := range worlds {
		if wanted.MatchString(w.name) {
			chosen = append(chosen, w)
		}
	}
	for _, word := range strings.FieldsFunc(os.Getenv("SEARCH_RANDOM"), func(r rune) bool { return r == ',' || r == ' ' }) {
		seed, err := strconv.ParseUint(word, 10, 32)
		if err != nil {
			t.Fatalf("SEARCH_RANDOM: %v", err)
		}
		w, err := randomWorld(seed)
		if err != nil {
			t.Fatal(err)
		}
		chosen = append(chosen, w)
	}
	return chosen
}

// chosenMethods returns the methods of SEARCH_METHODS that can run here, and says why the other methods cannot.
func chosenMethods() (chosen []method, skipped []string) {
	wanted := regexp.MustCompile(cmp.Or(os.Getenv("SEARCH_METHODS"), defaultMethods))
	for _, m := range methods() {
		switch {
		case !wanted.MatchString(m.name):
		case m.skipped != "":
			skipped = append(skipped, m.name+": "+m.skipped)
		default:
			chosen = append(chosen, m)
		}
	}
	return chosen, skipped
}

// TestSearchTable writes its table to the file that BENCH_SEARCH names.
func TestSearchTable(t *testing.T) {
	path := os.Getenv("BENCH_SEARCH")
	if path == "" {
		t.Skip("BENCH_SEARCH names no file: make bench-search runs it")
	}
	book, err := newTruthBook(os.Getenv("SEARCH_TRUTHS"))
	if err != nil {
		t.Fatal(err)
	}
	s := summary{
		commit: cmp.Or(os.Getenv("SEARCH_COMMIT"), "unknown"), engine: book.engine,
		seeds: setting(t, "SEARCH_SEEDS", defaultSeeds), trials: setting(t, "SEARCH_TRIALS", defaultTrials),
		rivals: setting(t, "SEARCH_RIVAL_TRIALS", defaultRivals), onlyAnswers: os.Getenv("SEARCH_ONLY_ANSWERS") != "",
	}
	chosen, skipped := chosenMethods()
	s.skipped = skipped
	for _, line := range skipped {
		t.Log("SKIPPED ", line)
	}
	for _, w := range chosenWorlds(t) {
		r, err := compare(t, w, chosen, book, s)
		if err != nil {
			t.Fatal(err)
		}
		s.results = append(s.results, r)
		if err := os.WriteFile(path, []byte(s.markdown()), 0o644); err != nil { // written after each world, because a run may be ended early
			t.Fatal(err)
		}
	}
	t.Log("\n" + s.markdown())
}

// compare runs all methods in one world, finds the truths (the true capacities) of all points that they recommended,
// and judges them.
func compare(t *testing.T, w world, chosen []method, book *truthBook, s summary) (result, error) {
	began := time.Now()
	runs, store := make([]methodRun, len(chosen)*s.seeds), runStore{os.Getenv("SEARCH_RUNS"), s.commit}
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i := range runs {
		group.Go(func() (err error) {
			m := chosen[i/s.seeds]
			runs[i], err = store.find(m, w, uint64(i%s.seeds+1), s.trialsOf(m))
			runs[i].Method = m.name
			t.Logf("%s, %s, seed %d: %.0f s, %.1f GPU-h", w.name, m.name, runs[i].Seed, runs[i].Took.Seconds(), runs[i].Spent.total().Hours())
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return result{}, err
	}
	ran := time.Since(began)
	truths, err := book.recommended(w, runs, s.onlyAnswers)
	if err != nil {
		return result{}, err
	}
	best, err := book.best(w, answersOf(runs), runtime.GOMAXPROCS(0))
	if err != nil {
		return result{}, err
	}
	if best.Capacity == 0 {
		return result{}, fmt.Errorf("%s: no method found a point that keeps the limits", w.name)
	}
	p, err := w.open(0)
	if err != nil {
		return result{}, err
	}
	r := result{world: w, best: best, bestAt: pointText(p.Search.Space, best.Point), byName: map[string][]judgedRun{}, noPath: s.onlyAnswers}
	for _, m := range chosen {
		r.names = append(r.names, m.name)
	}
	for _, f := range runs {
		last := 0.0
		if f.Best != nil {
			last = best.exact[f.Best.Point.String()]
		}
		j := judge(f, func(s step) float64 { return best.scale * truths[s.Point.String()] }, last, best.Capacity)
		r.byName[f.Method] = append(r.byName[f.Method], j)
		logRun(t, p.Search.Space, j, last)
	}
	n, took := book.cost(w)
	t.Logf("%s: %.0f s for %d studies, %.0f s for %d truths (%.1f s of one core each)", w.name, ran.Seconds(), len(runs),
		(time.Since(began) - ran).Seconds(), n, took.Seconds()/float64(max(1, n)))
	return r, nil
}

func logRun(t *testing.T, s *space.Space, j judgedRun, truth float64) {
	t.Helper()
	line := "nothing"
	if j.Best != nil {
		line = fmt.Sprintf("%s at %.3g req/s, truly %.3g", pointText(s, j.Best.Point), j.Best.Rate, truth)
	}
	t.Logf("%s, seed %d, %.0f s: %s; regret %.1f %%, %.1f GPU-h", j.Method, j.Seed, j.Took.Seconds(), line, 100*j.regret, hoursOf(j))
	if counted := j.Counted; counted > 0 && max(counted, j.Spent.total()) > min(counted, j.Spent.total())*101/100 {
		t.Logf("its own count of GPU time is %s, the meter's %s", counted, j.Spent.total())
	}
}

// answersOf returns the points that the methods recommend at the end, each once.
func answersOf(runs []methodRun) (points []space.Point) {
	for _, f := range runs {
		if f.Best != nil && !slices.ContainsFunc(points, func(p space.Point) bool { return p.String() == f.Best.Point.String() }) {
			points = append(points, f.Best.Point)
		}
	}
	return points
}

// recommended returns the true capacities of all points that were the best point of a method at any time, or only at its
// end.
func (b *truthBook) recommended(w world, runs []methodRun, onlyAnswers bool) (map[string]float64, error) {
	points := answersOf(runs) // the answers come first, because points far below them need no exact true capacity
	seen := map[string]bool{}
	for _, p := range points {
		seen[p.String()] = true
	}
	add := func(p space.Point) {
		if p != nil && !seen[p.String()] {
			seen[p.String()] = true
			points = append(points, p)
		}
	}
	for _, f := range runs {
		if onlyAnswers {
			break
		}
		for _, s := range f.Steps {
			add(s.Point)
		}
	}
	all, err := b.truthsOf(w, points, runtime.GOMAXPROCS(0))
	truths := map[string]float64{}
	for i, t := range all {
		truths[points[i].String()] = t.Capacity
	}
	return truths, err
}

// cost returns how many truths (true capacities) of a world were computed, and how much time of one core they took.
func (b *truthBook) cost(w world) (int, time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count[w.name], b.took[w.name]
}
