package simload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/samber/lo"

	"vllmtuner/realtime"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// The environment variables of `make bench-capacity`.
const (
	capacityVariable = "BENCH_CAPACITY"  // output file of TestCapacityTable; without it the test is skipped
	pairsVariable    = "BENCH_PAIRS"     // output file of TestPairTable; without it the test is skipped
	seedVariable     = "CAPACITY_SEED"   // seed of the random worlds; default 1
	repsVariable     = "CAPACITY_REPS"   // number of repetitions; default 40
	worldsVariable   = "CAPACITY_WORLDS" // regexp of world names; default all
	randomVariable   = "CAPACITY_RANDOM" // number of random worlds; default 4
	commitVariable   = "CAPACITY_COMMIT" // commit that the pages name
)

// hintError is the standard deviation of the logarithm of a hint. In a study of the tuner, the hint is the best
// capacity that the study has found so far.
const hintError = 0.35

// A draw is a number that decides the requests, their arrivals and the engine's noise. These are the first draws for
// each purpose. They are so far apart that no two purposes use the same draw.
const (
	truthDraws   = 1 << 21
	pilotDraws   = 1 << 22
	verdictDraws = 1 << 23
	pairDraws    = 1 << 24
)

// A methodResult has the answers of one method in one world, one for each repetition.
type methodResult struct {
	method  string
	answers []answer
}

// errors returns 100 · ln(answer/truth) for each repetition.
func (f methodResult) errors(truth float64) []float64 {
	var errors []float64
	for _, a := range f.answers {
		errors = append(errors, 100*math.Log(a.rate/truth))
	}
	return errors
}

// bounds counts the answers that are lower bounds and those that are upper bounds.
func (f methodResult) bounds() (least, most int) {
	for _, a := range f.answers {
		switch a.bound {
		case capacity.AtLeast:
			least++
		case capacity.AtMost:
			most++
		}
	}
	return least, most
}

// covered counts the 95 % intervals of the answers. The result hits counts only the intervals that contain the true
// capacity.
func (f methodResult) covered(truth float64) (hits, intervals int) {
	for _, a := range f.answers {
		if a.hi > 0 {
			intervals++
			if a.lo <= truth && truth <= a.hi {
				hits++
			}
		}
	}
	return hits, intervals
}

func (f methodResult) mean(of func(answer) float64) float64 {
	return mean(lo.Map(f.answers, func(a answer, _ int) float64 { return of(a) }))
}

func totalSeconds(a answer) float64  { return a.total().Seconds() }
func windowSeconds(a answer) float64 { return a.window.Seconds() }

// robustSD returns the median absolute deviation, scaled to the standard deviation of a normal distribution.
func robustSD(values []float64) float64 {
	middle := median(values)
	var away []float64
	for _, v := range values {
		away = append(away, math.Abs(v-middle))
	}
	return 1.4826 * median(away)
}

// A study has the true capacity of one world and the results of all methods there.
type study struct {
	world
	truth
	results []methodResult
}

// hint returns a rate near the true capacity. All methods of a repetition get the same hint.
func (s study) hint(draw int) float64 {
	r := rand.New(rand.NewPCG(uint64(draw), 0x41))
	return s.capacity * math.Exp(hintError*r.NormFloat64())
}

// repeat runs a method reps times, with the draw numbers first, first+1 and so on.
func (s study) repeat(m method, first, reps int) (methodResult, error) {
	f := methodResult{m.name, make([]answer, reps)}
	w := s.world
	w.guess = s.capacity
	err := inParallel(reps, func(i int) (err error) {
		f.answers[i], err = m.find(w, first+i, s.hint(first+i))
		return err
	})
	return f, err
}

// compare runs all methods. Then it runs our search once more, with other window lengths. With these lengths, all
// windows together last as long as all windows of the cheapest rival.
func (s *study) compare(reps int) error {
	own := []method{
		{"ours, search", ours(searchLengths, 0)}, {"ours, confirmation", ours(confirmLengths, 0)}, {"ours, ±5 %", ours(confirmLengths, 0.05)},
	}
	far := []method{
		{"ours, from a tenth", ours(searchLengths, 0).withHintTimes(0.1)}, {"ours, from four times", ours(searchLengths, 0).withHintTimes(4)},
	}
	for _, m := range slices.Concat(own, rivals(), far) {
		f, err := s.repeat(m, 0, reps)
		if err != nil {
			return err
		}
		s.results = append(s.results, f)
	}
	// Only the cheapest rival is matched. Every other rival takes longer than our search in any setting.
	i := slices.IndexFunc(s.results, func(f methodResult) bool { return f.method == cheapest })
	m, err := s.oursWithin(s.results[i].mean(windowSeconds), "ours, as "+cheapest)
	if err != nil {
		return err
	}
	same, err := s.repeat(m, 0, reps)
	s.results = append(s.results, same)
	return err
}

// oursWithin returns our search with scaled windows, which together last the given number of seconds. Pilot runs with
// other draws find the scale.
func (s study) oursWithin(seconds float64, name string) (method, error) {
	const pilots = 6
	scale := 1.0
	for range 3 { // three rounds suffice, because the number of probes hardly depends on the lengths
		f, err := s.repeat(method{name, ours(scaled(scale), 0)}, pilotDraws, pilots)
		if err != nil {
			return method{}, err
		}
		scale *= seconds / f.mean(windowSeconds)
	}
	return method{name, ours(scaled(scale), 0)}, nil
}

// minRequests is the minimum number of requests for a verdict on a p99.
const minRequests = 100

func scaled(by float64) trial.Lengths {
	window := time.Duration(by * float64(searchLengths.Window))
	return trial.Lengths{Window: window, MinRequests: max(minRequests, int(by*float64(searchLengths.MinRequests)))}
}

// setting reads a whole number from the environment.
func setting(t *testing.T, variable string, otherwise int) int {
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		t.Fatalf("%s=%s: must be a whole number of at least 0", variable, text)
	}
	return n
}

// chosenWorlds returns the named and the random worlds that the environment variables choose.
func chosenWorlds(t *testing.T) []world {
	worlds := namedWorlds(t)
	seed, n := setting(t, seedVariable, 1), setting(t, randomVariable, 4)
	random := make([]world, n)
	err := inParallel(n, func(i int) (err error) {
		random[i], err = randomWorld(uint64(seed*1000 + i))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	pattern, err := regexp.Compile(os.Getenv(worldsVariable))
	if err != nil {
		t.Fatalf("%s: %v", worldsVariable, err)
	}
	worlds = slices.DeleteFunc(append(worlds, random...), func(w world) bool { return !pattern.MatchString(w.name) })
	if len(worlds) == 0 {
		t.Fatalf("%s=%s names no world", worldsVariable, pattern)
	}
	return worlds
}

// TestCapacityTable measures how well the methods find the capacity, and writes a report.
func TestCapacityTable(t *testing.T) {
	file := os.Getenv(capacityVariable)
	if file == "" {
		t.Skip("takes half an hour; make bench-capacity runs it")
	}
	reps := setting(t, repsVariable, 40)
	r := report{commit: os.Getenv(commitVariable), reps: reps, seed: setting(t, seedVariable, 1)}
	for _, w := range chosenWorlds(t) {
		began := time.Now()
		truth, err := w.truth(truthDraws, wholeEffort)
		if err != nil { // without the true capacity there is no error to measure; the page names the world and says why
			r.leftOut = append(r.leftOut, err.Error())
			continue
		}
		known := time.Since(began)
		s := study{world: w, truth: truth}
		if err := s.compare(reps); err != nil {
			t.Fatal(err)
		}
		r.studies = append(r.studies, s)
		t.Logf("%s: %.4g req/s ± %.2f %%; truth %.0f s, methods %.0f s",
			w.name, truth.capacity, 100*truth.se, known.Seconds(), (time.Since(began) - known).Seconds())
		for _, f := range s.results {
			_, sd := meanSD(f.errors(truth.capacity))
			t.Logf("  %-24s SD %5.1f RMSE %5.1f %% in %5.0f s", f.method, sd, rms(f.errors(truth.capacity)), f.mean(totalSeconds))
		}
		writePage(t, file, r.markdown()) // write the results so far after each world
	}
	var err error
	if r.parts, err = parts(r.studies, []string{"ours, search", "ours, confirmation"}); err != nil {
		t.Fatal(err)
	}
	for _, s := range r.studies {
		if !slices.Contains([]string{"h200-phase1", "h200-plain", "l4-tpot"}, s.name) {
			continue
		}
		rows, err := verdicts(s, 12)
		if err != nil {
			t.Fatal(err)
		}
		r.verdicts = append(r.verdicts, rows...)
	}
	writePage(t, file, r.markdown())
}

func writePage(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A true capacity that is measured with little effort hardly depends on the draws, and each of our searches ends near
// that capacity.
func TestCapacityIsFound(t *testing.T) {
	realtime.Long(t, "simulates half a million requests")
	for _, name := range []string{"small-seqs16", "small-tpot"} {
		w := named(t, name)
		little := effort{stretch{5000, 300 * time.Second}, 6, 6, 0}
		truth, err := w.truth(truthDraws, little)
		if err != nil {
			t.Fatal(err)
		}
		again, err := w.truth(pilotDraws, little)
		if err != nil {
			t.Fatal(err)
		}
		if math.Abs(math.Log(again.capacity/truth.capacity)) > 0.03 {
			t.Errorf("%s: the truth is %.4g req/s and from other draws %.4g, want within 3 %%", name, truth.capacity, again.capacity)
		}
		s := study{world: w, truth: truth}
		f, err := s.repeat(method{"ours", ours(searchLengths, 0)}, 0, realtime.Rounds(4, 16))
		if err != nil {
			t.Fatal(err)
		}
		for i, e := range f.errors(truth.capacity) {
			if math.Abs(e) > 25 {
				t.Errorf("%s, draw %d: our search finds %.4g req/s, want the true %.4g within 25 %%", name, i, f.answers[i].rate, truth.capacity)
			}
		}
	}
}

// Each rival finds the capacity as exactly as the distance between its rates allows.
func TestRivalsFindACapacity(t *testing.T) {
	realtime.Only(t, "simulates the loads of rivals")
	w := named(t, "small-seqs16")
	w.guess = 7.5 // within 2 % of the world's true capacity
	for _, row := range []struct {
		name             string
		min, max         int     // probes
		minEach, maxEach int     // range of the number of requests in a probe
		maxError         float64 // largest allowed absolute value of ln(answer/truth)
	}{
		{"sweep", 12, 12, 300, 300, 0.5},
		{"bisection", 3, 4, 300, 300, 0.5},
		{"AIPerf, 300", 8, 30, 300, 300, 0.3},
		{"closed loop", 5, 14, 300, 400, 0.35},
	} {
		all := rivals()
		m := all[slices.IndexFunc(all, func(m method) bool { return m.name == row.name })]
		a, err := m.find(w, 1, 0)
		if err != nil {
			t.Fatal(err)
		}
		if off := math.Log(a.rate / w.guess); a.bound != capacity.Exact || math.Abs(off) > row.maxError {
			t.Errorf("%s finds %s %.4g req/s, want %.4g within a factor of %.2f", row.name, a.bound, a.rate, w.guess, math.Exp(row.maxError))
		}
		if each := a.requests / a.probes; a.probes < row.min || a.probes > row.max || each < row.minEach || each > row.maxEach {
			t.Errorf("%s makes %d probes with %d requests in all, want %d to %d probes of %d to %d requests each",
				row.name, a.probes, a.requests, row.min, row.max, row.minEach, row.maxEach)
		}
		if a.window <= 0 || a.runOut < 0 || (a.leadIn > 0) == (row.name == "sweep" || row.name == "bisection") {
			t.Errorf("%s spends %s on windows, %s on lead-ins and %s on run-outs; want windows, and lead-ins except in sweep and bisection",
				row.name, a.window, a.leadIn, a.runOut)
		}
	}
}

// The same seed gives the same world, and another seed gives another world.
func TestRandomWorldsAreTheirSeeds(t *testing.T) {
	realtime.Only(t, "draws worlds by simulating them")
	const n = 6
	got := make([]world, 2*n)
	if err := inParallel(2*n, func(i int) (err error) {
		got[i], err = randomWorld(uint64(i % n))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for i, w := range got[:n] {
		same := fmt.Sprint(got[n+i].about, got[n+i].args, got[n+i].guess, got[n+i].slo)
		if text := fmt.Sprint(w.about, w.args, w.guess, w.slo); text != same {
			t.Errorf("seed %d gives %s the first time and %s the second time", i, text, same)
		}
		if i > 0 && w.guess == got[0].guess {
			t.Errorf("seeds 0 and %d give the same capacity", i)
		}
		if w.guess < minCapacity || w.guess > maxCapacity || w.reuses() != (w.cache == trial.Steady) {
			t.Errorf("seed %d: capacity %.3g req/s with cache %s", i, w.guess, w.cache)
		}
	}
}

func TestSharesAreReadMonotonely(t *testing.T) {
	rates := []float64{1, 2, 4, 8}
	for _, row := range []struct {
		name   string
		shares []float64
		want   float64
	}{
		{"between two rates by the logarithm", []float64{0.001, 0.0025, 0.04, 0.2}, 2 * math.Sqrt2},
		{"at a rate", []float64{0.001, 0.002, 0.01, 0.2}, 4},
		{"a dip is pooled", []float64{0.001, 0.006, 0.004, 0.02}, 4 * math.Pow(2, math.Log(2)/math.Log(4))},
		{"below the first", []float64{0.02, 0.04, 0.08, 0.16}, 0.5},
		{"above the last", []float64{0.00125, 0.0025, 0.0025, 0.005}, 16},
		{"no growth, no capacity", []float64{0.001, 0.001, 0.001, 0.001}, math.Inf(1)},
	} {
		if got := crossOne(rates, row.shares, goal); math.Abs(got-row.want) > 1e-9*row.want {
			t.Errorf("%s: crossOne(%v) = %g, want %g", row.name, row.shares, got, row.want)
		}
	}
	if rate, limit := cross(rates, [][]float64{{.001, .001, .001, .02}, {.001, .01, .1, .9}}); rate != 2 || limit != 1 {
		t.Errorf("cross = %g by limit %d, want the lower of the two capacities: 2 by limit 1", rate, limit)
	}
}

// The rule of the verdict was chosen by simulating independent requests. The probabilities from that simulation must
// agree with the exact ones.
func TestIndependentVerdicts(t *testing.T) {
	for i, want := range []float64{0.94, 0.81, 0.65, 0.34, 0.15} {
		if got := atMostBroken(300, brokenShares[i]); math.Abs(got-want) > 0.01 {
			t.Errorf("a window of 300 passes with probability %.3f at a share of %g, want %.2f", got, brokenShares[i], want)
		}
	}
	if got := atMostBroken(1000, 0.02); math.Abs(got-0.01) > 0.005 {
		t.Errorf("a window of 1000 passes with probability %.3f at 2 %%, want 0.01", got)
	}
}
