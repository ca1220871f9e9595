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

	"vllmtuner/bench"
	"vllmtuner/realtime"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// The environment variables of `make bench-capacity`.
const (
	capacityVariable = "BENCH_CAPACITY"  // file that the tables go to
	pairsVariable    = "BENCH_PAIRS"     // file that those of pairs go to
	seedVariable     = "CAPACITY_SEED"   // of the random worlds; 1
	repsVariable     = "CAPACITY_REPS"   // repetitions; 40
	worldsVariable   = "CAPACITY_WORLDS" // regexp of names; all
	randomVariable   = "CAPACITY_RANDOM" // how many random worlds; 4
	commitVariable   = "CAPACITY_COMMIT"
)

// hintError is the standard deviation of the logarithm of a hint. In a study the hint is the best capacity so far.
const hintError = 0.35

// The first draws of each purpose, so far apart that no two purposes share a load.
const (
	truthDraws   = 1 << 21
	pilotDraws   = 1 << 22
	verdictDraws = 1 << 23
	pairDraws    = 1 << 24
	stratumDraws = 1 << 25
)

// A finding is what a method found in one world over all repetitions.
type finding struct {
	method  string
	answers []answer
}

// errors are ln(answer/truth) in per cent.
func (f finding) errors(truth float64) []float64 {
	var errors []float64
	for _, a := range f.answers {
		errors = append(errors, 100*math.Log(a.rate/truth))
	}
	return errors
}

// bounds counts the answers that are lower and upper bounds. A bound counts as the rate at which it was found.
func (f finding) bounds() (least, most int) {
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

// covered counts the answers whose interval contains the truth.
func (f finding) covered(truth float64) (hit, of int) {
	for _, a := range f.answers {
		if a.hi > 0 {
			of++
			if a.lo <= truth && truth <= a.hi {
				hit++
			}
		}
	}
	return hit, of
}

// mean is the mean of a figure over the repetitions.
func (f finding) mean(of func(answer) float64) float64 {
	sum := 0.0
	for _, a := range f.answers {
		sum += of(a) / float64(len(f.answers))
	}
	return sum
}

func totalSeconds(a answer) float64  { return a.total().Seconds() }
func windowSeconds(a answer) float64 { return a.window.Seconds() }

// robustSD is the median absolute deviation, scaled to the standard deviation of a normal distribution.
func robustSD(values []float64) float64 {
	middle := bench.Percentile(slices.Sorted(slices.Values(values)), 50)
	var away []float64
	for _, v := range values {
		away = append(away, math.Abs(v-middle))
	}
	slices.Sort(away)
	return 1.4826 * bench.Percentile(away, 50)
}

// A study has all results in one world.
type study struct {
	world
	truth
	findings []finding
}

// hint returns a rate near the truth, the same for all methods of a repetition.
func (s study) hint(draw int) float64 {
	r := rand.New(rand.NewPCG(uint64(draw), 0x41))
	return s.capacity * math.Exp(hintError*r.NormFloat64())
}

// repeat runs a method with the draws from first on.
func (s study) repeat(m method, first, reps int) (finding, error) {
	f := finding{m.name, make([]answer, reps)}
	w := s.world
	w.guess = s.capacity
	err := each(reps, func(i int) (err error) {
		f.answers[i], err = m.find(w, first+i, s.hint(first+i))
		return err
	})
	return f, err
}

// compare runs all methods, and our search once more with as many seconds of window as the cheapest rival.
func (s *study) compare(reps int) error {
	own := []method{
		{"ours, search", ours(searchLengths, 0)}, {"ours, confirmation", ours(confirmLengths, 0)}, {"ours, ±5 %", ours(confirmLengths, 0.05)},
	}
	far := []method{
		{"ours, from a tenth", ours(searchLengths, 0).from(0.1)}, {"ours, from four times", ours(searchLengths, 0).from(4)},
	}
	for _, m := range slices.Concat(own, rivals(), far) {
		f, err := s.repeat(m, 0, reps)
		if err != nil {
			return err
		}
		s.findings = append(s.findings, f)
	}
	for _, f := range s.findings[len(own):] {
		if f.method != cheapest { // the others take longer than ours does in any setting
			continue
		}
		m, err := s.oursWithin(f.mean(windowSeconds), "ours, as "+f.method)
		if err != nil {
			return err
		}
		same, err := s.repeat(m, 0, reps)
		if err != nil {
			return err
		}
		s.findings = append(s.findings, same)
	}
	return nil
}

// oursWithin returns our search with windows scaled to a total length in seconds. Pilot runs with other draws give the scale.
func (s study) oursWithin(seconds float64, name string) (method, error) {
	const pilots = 6
	scale := 1.0
	for range 3 { // the number of probes hardly depends on the lengths
		f, err := s.repeat(method{name, ours(scaled(scale), 0)}, pilotDraws, pilots)
		if err != nil {
			return method{}, err
		}
		scale *= seconds / f.mean(windowSeconds)
	}
	return method{name, ours(scaled(scale), 0)}, nil
}

// leastRequests is the minimum number of requests for a verdict on a p99.
const leastRequests = 100

func scaled(by float64) trial.Lengths {
	window := time.Duration(by * float64(searchLengths.Window))
	return trial.Lengths{Window: window, MinRequests: max(leastRequests, int(by*float64(searchLengths.MinRequests)))}
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

// chosenWorlds returns the named worlds and a number of random worlds, as the environment selects them.
func chosenWorlds(t *testing.T) []world {
	worlds, err := namedWorlds()
	if err != nil {
		t.Fatal(err)
	}
	seed, n := setting(t, seedVariable, 1), setting(t, randomVariable, 4)
	random := make([]world, n)
	err = each(n, func(i int) (err error) {
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
		if err != nil { // nothing can be held against it, and the page says so
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
		for _, f := range s.findings {
			_, sd := meanSD(f.errors(truth.capacity))
			t.Logf("  %-24s SD %5.1f RMSE %5.1f %% in %5.0f s", f.method, sd, rms(f.errors(truth.capacity)), f.mean(totalSeconds))
		}
		r.write(t, file)
	}
	var err error
	if r.parts, err = parts(r.studies, []string{"ours, search", "ours, confirmation"}); err != nil {
		t.Fatal(err)
	}
	for _, s := range r.studies {
		if slices.Contains([]string{"h200-plain", "h200-seqs48", "l4-tpot", "small-seqs16"}, s.name) {
			rows, err := s.stratify(reps)
			if err != nil {
				t.Fatal(err)
			}
			r.stratified = append(r.stratified, rows...)
		}
		if !slices.Contains([]string{"h200-phase1", "h200-plain", "l4-tpot"}, s.name) {
			continue
		}
		rows, err := verdicts(s, 12)
		if err != nil {
			t.Fatal(err)
		}
		r.verdicts = append(r.verdicts, rows...)
	}
	r.write(t, file)
}

// write writes the results so far.
func (r report) write(t *testing.T, file string) {
	t.Helper()
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

// With less effort, other draws give the same truth, and our search finds a capacity near it each time.
func TestCapacityIsFound(t *testing.T) {
	realtime.Only(t, "simulates half a million requests")
	worlds, err := namedWorlds()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"small-seqs16", "small-tpot"} {
		w := worlds[slices.IndexFunc(worlds, func(w world) bool { return w.name == name })]
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
		f, err := s.repeat(method{"ours", ours(searchLengths, 0)}, 0, 8)
		if err != nil {
			t.Fatal(err)
		}
		for i, e := range f.errors(truth.capacity) {
			if math.Abs(e) > 25 {
				t.Errorf("%s, draw %d: ours says %.4g req/s, the truth is %.4g, want within 25 %%", name, i, f.answers[i].rate, truth.capacity)
			}
		}
	}
}

// Each rival finds the capacity as exactly as its steps allow.
func TestRivalsFindACapacity(t *testing.T) {
	realtime.Only(t, "simulates the loads of rivals")
	worlds, err := namedWorlds()
	if err != nil {
		t.Fatal(err)
	}
	w := worlds[slices.IndexFunc(worlds, func(w world) bool { return w.name == "small-seqs16" })]
	w.guess = 7.5 // within 2 % of its truth
	for _, row := range []struct {
		name                 string
		fewest, most         int     // probes
		fewestEach, mostEach int     // requests of a probe
		off                  float64 // ln(answer/truth) may be so far off
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
		if off := math.Log(a.rate / w.guess); a.bound != capacity.Exact || math.Abs(off) > row.off {
			t.Errorf("%s says %s %.4g req/s, want %.4g to a factor of %.2f", row.name, a.bound, a.rate, w.guess, math.Exp(row.off))
		}
		if each := a.requests / a.probes; a.probes < row.fewest || a.probes > row.most || each < row.fewestEach || each > row.mostEach {
			t.Errorf("%s takes %d probes and %d requests, want %d to %d, each of %d to %d",
				row.name, a.probes, a.requests, row.fewest, row.most, row.fewestEach, row.mostEach)
		}
		if a.window <= 0 || a.runOut < 0 || (a.leadIn > 0) == (row.name == "sweep" || row.name == "bisection") {
			t.Errorf("%s takes %s of windows, %s of lead-ins and %s of run-outs", row.name, a.window, a.leadIn, a.runOut)
		}
	}
}

// The same seed gives the same world, and another seed gives another world.
func TestRandomWorldsAreTheirSeeds(t *testing.T) {
	realtime.Only(t, "draws worlds by simulating them")
	const n = 6
	got := make([]world, 2*n)
	if err := each(2*n, func(i int) (err error) {
		got[i], err = randomWorld(uint64(i % n))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for i, w := range got[:n] {
		same := fmt.Sprint(got[n+i].about, got[n+i].args, got[n+i].guess, got[n+i].slo)
		if text := fmt.Sprint(w.about, w.args, w.guess, w.slo); text != same {
			t.Errorf("seed %d gives %s, and again %s", i, text, same)
		}
		if i > 0 && w.guess == got[0].guess {
			t.Errorf("seeds 0 and %d give the same capacity", i)
		}
		if w.guess < leastCapacity || w.guess > mostCapacity || w.reuses() != (w.cache == trial.Steady) {
			t.Errorf("seed %d: %.3g req/s under %s", i, w.guess, w.cache)
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

// The rule of the verdict was chosen by simulated probabilities for independent requests. These are the exact ones.
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
