package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A world is a simulated study and the true capacities of its servers.
type world struct {
	kind    string
	study   studies.Study
	carries []float64 // true capacity in requests per second, by trial number
}

// truths draws the true capacities of n servers at random. The first one is the default. There are four kinds of
// studies. Either all servers are equal, or some are worse than the default, or all are spread around the default, or
// only the default is worse.
func truths(rng *rand.Rand, n int) (name string, carries []float64) {
	kind := rng.IntN(4)
	for i := range n {
		c := 10.0
		switch {
		case i == 0 && kind == 3:
			c *= 0.6 + 0.3*rng.Float64()
		case i == 0:
		case kind == 1 && rng.IntN(2) == 0:
			c *= 1 - 0.6*rng.Float64()
		case kind == 2:
			c *= math.Exp(0.1 * rng.NormFloat64())
		}
		carries = append(carries, c)
	}
	return []string{"identical", "twins and losers", "spread", "poor default"}[kind], carries
}

// byEstimate makes a study whose capacities have intervals. The errors of the capacities may be correlated, as if all
// trials had the same requests.
func byEstimate(rng *rand.Rand) world {
	n := []int{1, 2, 3, 8, 30}[rng.IntN(5)]
	name, carries := truths(rng, n)
	w := world{kind: "estimated, " + name, carries: carries}
	shared := rng.Float64() * 0.8
	const pieces = 40
	var common [pieces]float64
	for i := range common {
		common[i] = rng.NormFloat64()
	}
	medianErr := 0.02 + 0.1*rng.Float64()
	maxRate := math.Inf(1)
	if rng.IntN(3) == 0 {
		maxRate = 7 + 3*rng.Float64()
		w.kind += ", rates too low"
	}
	var trials []studies.Trial
	for i, c := range carries {
		se := medianErr * math.Exp(0.3*rng.NormFloat64())
		if rng.IntN(10) == 0 {
			se *= 3
		}
		var found capacity.Capacity
		off := 0.0
		for p := range pieces {
			moved := se / math.Sqrt(pieces) * (math.Sqrt(shared)*common[p] + math.Sqrt(1-shared)*rng.NormFloat64())
			found.Pieces = append(found.Pieces, capacity.Piece{Draw: 0, Block: p, Moved: moved})
			off += moved
		}
		found.Rate, found.Bound, found.StdErr, found.Binding = c*math.Exp(off), capacity.Exact, se, "p99 TPOT"
		found.Low, found.High = found.Rate*0.97, found.Rate*1.04
		found.Lowest, found.Highest = found.Rate*math.Exp(-1.96*se), found.Rate*math.Exp(1.96*se)
		found.Steps = []capacity.Step{{Rate: found.Low, Outcome: capacity.Outcome{Pass: true}}, {Rate: found.High}}
		if found.Rate > maxRate { // the search ends at the highest rate, which passes
			found = capacity.Capacity{Rate: maxRate, Low: maxRate, Bound: capacity.AtLeast, Binding: found.Binding, Steps: []capacity.Step{{Rate: maxRate, Outcome: capacity.Outcome{Pass: true}}}}
		}
		trials = append(trials, numbered(i, studies.Trial{Result: trial.Result{Outcome: trial.Measured, Capacity: found}}))
	}
	w.study = studyOf(studies.Done, "", trials...)
	return w
}

// numbered gives a trial its origin and args.
func numbered(i int, t studies.Trial) studies.Trial {
	if i == 0 {
		return withArgs(t, studies.Default)
	}
	return withArgs(t, studies.Sampled, "--max-num-seqs", fmt.Sprint(i))
}

// bySearch makes a study whose capacities are found by search and have no intervals. The range of rates may be too low
// or too high, the load generator may be late, and servers may not start.
func bySearch(rng *rand.Rand) world {
	n := []int{1, 2, 3, 8, 20}[rng.IntN(5)]
	name, carries := truths(rng, n)
	minRate, maxRate := 0.05, 200.0
	switch rng.IntN(4) {
	case 0:
		maxRate = 9 * math.Exp(0.3*rng.NormFloat64())
		name += ", rates too low"
	case 1:
		minRate = 9 * math.Exp(0.3*rng.NormFloat64())
		name += ", rates too high"
	}
	busy := 0.0
	if rng.IntN(2) == 0 {
		busy = rng.Float64()
		name += ", late client"
	}
	dies := 0.0
	if rng.IntN(4) == 0 {
		dies = 0.3
		name += ", failures"
	}
	w := world{kind: "searched, " + name, carries: carries}
	var trials []studies.Trial
	for i, c := range carries {
		if rng.Float64() < dies {
			outcome := []trial.Outcome{trial.Infeasible, trial.Unknown, trial.Dropped}[rng.IntN(3)]
			trials = append(trials, numbered(i, failed(outcome, serverctl.OOMStart, "CUDA out of memory")))
			continue
		}
		const noise = 0.04 // standard deviation of ln(capacity) between windows
		search := capacity.Search{Hint: math.Exp(2 * rng.NormFloat64()), Min: minRate, Max: max(minRate, maxRate), Factor: 1.35, Tolerance: 0.08, MaxProbes: 2 + rng.IntN(12)}
		found, err := search.Find(context.Background(), func(_ context.Context, rate float64) (capacity.Outcome, error) {
			h := math.Log(c/rate) + noise*rng.NormFloat64()
			o := capacity.Outcome{Pass: h >= 0, Headroom: h, Binding: "p99 TPOT", InFlight: 20 * rate}
			if rng.Float64() < busy {
				late := rng.Float64() < 0.7
				switch {
				case o.Pass && late: // waits in the load generator may turn a pass into a fail
					o.Limited, o.Pass = "the load generator was 18 ms late at p99", rng.IntN(2) == 0
				case late && h > -0.1: // late requests thin out bursts, which may turn a fail into a pass
					o.Limited, o.Pass = "the load generator was 18 ms late at p99", true
				}
			}
			return o, nil
		})
		trials = append(trials, numbered(i, studies.Trial{Result: resultOf(found, err)}))
	}
	w.study = studyOf(studies.Done, "", trials...)
	return w
}

// resultOf makes the result of a trial as package trial does.
func resultOf(found capacity.Capacity, err error) trial.Result {
	switch {
	case errors.Is(err, capacity.ErrLimited):
		return trial.Result{Outcome: trial.Unknown, Class: serverctl.ClientLimited, Evidence: err.Error()}
	case found.Limited != "":
		return trial.Result{Outcome: trial.Measured, Class: serverctl.ClientLimited, Capacity: found}
	}
	return trial.Result{Outcome: trial.Measured, Capacity: found}
}

// A judge counts the claims in reports, and how many of them are false. It knows the true capacities and the verdicts,
// but not how reports are made.
type judge struct {
	claims, false map[string]int
	examples      map[string]string
}

func (j *judge) claim(kind string, ok bool, w world, text string) {
	j.claims[kind]++
	if !ok {
		j.false[kind]++
		if j.examples[kind] == "" {
			j.examples[kind] = w.kind + ": " + text
		}
	}
}

const percentWord = `([+-]?\d+) %`

var (
	overRule     = regexp.MustCompile(`gain (at least )?` + percentWord + `[^;]* over trial (\d+)`)
	intervalRule = regexp.MustCompile(`95 %: ` + percentWord + ` to ` + percentWord)
	betterRule   = regexp.MustCompile(`(over |under )?(\d[0-9.]*) % likely better`)
	luckRule     = regexp.MustCompile(`in (\d+) of 100 studies`)
	capacityRule = regexp.MustCompile(`capacity (at least about |at least )?([0-9.]+) req/s`)
	carriesRule  = regexp.MustCompile(`capacity [0-9.]+ req/s, 95 %: ([0-9.]+) to ([0-9.]+)`)
	useRule      = regexp.MustCompile(`^Use these flags: (at least )?` + percentWord + ` over`)
	unmetRule    = regexp.MustCompile(`(\d+) not known to meet`)
	noneRule     = regexp.MustCompile(`no other(?:s| flags) are known to carry more|nothing else`)
)

func parseNumber(t *testing.T, word string) float64 {
	t.Helper()
	f, err := strconv.ParseFloat(word, 64)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// report judges all reports about a study.
func (j *judge) report(t *testing.T, w world) {
	t.Helper()
	best := written(t, BestText, w.study, Options{})
	status := written(t, StatusText, w.study, Options{Rows: 100})
	var shell bytes.Buffer
	if err := BestYAML(&shell, w.study, Options{}); err != nil && !errors.Is(err, ErrNothingMet) {
		t.Fatal(err)
	}
	for _, text := range []string{best, status, shell.String()} {
		if strings.Contains(text, "-0 %") {
			j.claim("-0 %", false, w, text)
		}
	}
	items := itemsOf(best)
	j.counts(t, w, items["trials"])
	d := bestOf(w.study, Options{})
	if !d.Met {
		return
	}
	chosen := w.study.Trials[d.Best.Number]
	carries := w.carries[d.Best.Number]
	j.capacity(t, w, "capacity "+items["capacity"], chosen, carries)
	if a := d.Best.Advice; a != nil {
		j.claim("an advised rate is carried", a.Rate <= carries, w, fmt.Sprint(*a))
	}
	gain := items["gain"]
	j.gain(t, w, "gain "+gain, chosen, carries)
	if i := strings.Index(gain, "95 %:"); i >= 0 && d.Gain != nil {
		j.trust(t, w, gain[i:], chosen, w.study.Trials[d.Gain.Trial], carries, w.carries[d.Gain.Trial])
	}
	first, _, _ := strings.Cut(best, "\n\n")
	first = strings.Join(strings.Fields(first), " ")
	if g := d.Gain; g != nil && g.Trial != chosen.Number && carries <= w.carries[g.Trial] {
		j.claim("no better, and no gain in the first sentence", !useRule.MatchString(first), w, first)
	}
	if noneRule.MatchString(first) {
		highest := 0.0
		for _, other := range w.study.Trials {
			if other.Met() && other.Number != chosen.Number {
				highest = max(highest, other.Result.Capacity.Carried())
			}
		}
		j.claim("nothing else measured higher", highest <= chosen.Result.Capacity.Carried(), w, first)
	}
	j.table(t, w, status, chosen)
}

// itemsOf returns the items of a report by name, each on one line.
func itemsOf(text string) map[string]string {
	items, name := map[string]string{}, ""
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if len(line) < 10 || strings.HasPrefix(line, "--") {
			continue
		}
		if head := strings.TrimSpace(line[:10]); head != "" {
			name = head
		}
		items[name] = strings.TrimSpace(items[name] + " " + strings.TrimSpace(line[10:]))
	}
	return items
}

// exactly reports whether the capacity of a trial lies between a rate that passed and one that failed.
func exactly(t studies.Trial) bool { return t.Result.Capacity.Bound == capacity.Exact }

// bounded reports whether the verdicts support a lower bound of the gain of best over reference.
func bounded(best, reference studies.Trial, gain float64) bool {
	passed, failed := 0.0, reference.Result.Capacity.Highest
	for _, s := range best.Result.Capacity.Steps {
		if s.Pass && s.Limited == "" {
			passed = max(passed, s.Rate)
		}
	}
	if !exactly(reference) || failed == 0 { // without an interval the bracket is known from only two verdicts, which may be chance
		return false
	}
	for _, s := range reference.Result.Capacity.Steps {
		if !s.Pass && s.Limited == "" {
			failed = max(failed, s.Rate)
		}
	}
	return passed/failed-1 >= gain-0.005
}

// counts judges the line that says how many trials ended in which way.
func (j *judge) counts(t *testing.T, w world, text string) {
	if m := unmetRule.FindStringSubmatch(text); m != nil {
		n := 0
		for _, one := range w.study.Trials {
			passed := slices.ContainsFunc(one.Result.Capacity.Steps, func(s capacity.Step) bool { return s.Pass && s.Limited == "" })
			if one.Result.Outcome == trial.Measured && !one.Met() && !passed {
				n++
			}
		}
		j.claim("no rate passed in time in the trials counted as unmet", parseNumber(t, m[1]) <= float64(n), w, text)
	}
}

func (j *judge) capacity(t *testing.T, w world, text string, chosen studies.Trial, carries float64) {
	if m := carriesRule.FindStringSubmatch(text); m != nil {
		low, high := parseNumber(t, m[1]), parseNumber(t, m[2])
		j.claim("the winner's interval holds its capacity", low <= carries*1.005 && carries <= high*1.005, w, text)
		return
	}
	m := capacityRule.FindStringSubmatch(text)
	switch {
	case m == nil:
		t.Fatalf("%s: no capacity in %q", w.kind, text)
	case m[1] == "at least ":
		late := slices.ContainsFunc(chosen.Result.Capacity.Steps, func(s capacity.Step) bool {
			return s.Pass && s.Limited == "" && math.Abs(s.Rate/parseNumber(t, m[2])-1) < 0.006
		})
		j.claim("a lower bound is a rate that passed in time", late, w, text)
	}
}

// gain judges the gain that a report states.
func (j *judge) gain(t *testing.T, w world, text string, chosen studies.Trial, carries float64) {
	m := overRule.FindStringSubmatch(text)
	if m == nil {
		return
	}
	reference := w.study.Trials[int(parseNumber(t, m[3]))]
	claimed := parseNumber(t, m[2]) / 100
	truth := carries/w.carries[reference.Number] - 1
	switch m[1] {
	case "at least ":
		j.claim("a lower bound of a gain has the verdicts' support", bounded(chosen, reference, claimed), w, text)
		j.claim("a lower bound of a gain is true", truth >= claimed-0.005, w, text)
	default:
		j.claim("a gain between capacities that are known", exactly(chosen) && exactly(reference), w, text)
		if !strings.Contains(text, "95 %:") && !strings.Contains(text, "is not known") {
			j.claim("a gain that says how sure it is", false, w, text)
		}
	}
}

// trust judges what a report says about a gain: its interval, its probability, and the word distinguishable.
func (j *judge) trust(t *testing.T, w world, text string, is, than studies.Trial, carries, others float64) {
	truth := carries/others - 1
	m := intervalRule.FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("%s: no interval in %q", w.kind, text)
	}
	j.claim("an interval of a gain holds the truth", parseNumber(t, m[1])/100 <= truth+0.005 && truth-0.005 <= parseNumber(t, m[2])/100, w, text)
	j.claim("an interval between capacities that have one", is.Result.Capacity.StdErr > 0 && than.Result.Capacity.StdErr > 0, w, text)
	sure := 0.0
	if p := betterRule.FindStringSubmatch(text); p != nil {
		sure = parseNumber(t, p[2])
	} else if p := luckRule.FindStringSubmatch(text); p != nil {
		sure = 100 - parseNumber(t, p[1])
	} else {
		t.Fatalf("%s: no probability in %q", w.kind, text)
	}
	if truth <= 0 { // the best is not truly better; count how often the report says that it is
		j.claim("no better, and under 90 % likely so", sure < 90, w, text)
		j.claim("no better, and not distinguishable", strings.Contains(text, "not distinguishable"), w, text)
	}
}

var rowRule = regexp.MustCompile(`(?m)^ *(\d+) +\S+ +(\S+) +(>=|<=)?([+-]?\d+) ?% `)

// table judges the column that compares each trial with the best.
func (j *judge) table(t *testing.T, w world, text string, best studies.Trial) {
	for _, m := range rowRule.FindAllStringSubmatch(text, -1) {
		one := w.study.Trials[int(parseNumber(t, m[1]))]
		ok := exactly(one) && exactly(best)
		if m[3] == ">=" {
			ok = exactly(best) && one.Result.Capacity.Low > 0
		}
		if m[3] == "<=" {
			ok = exactly(one) && best.Result.Capacity.Low > 0
		}
		j.claim("a row compares capacities that are known", ok, w, m[0])
	}
}

// Every printed gain, interval, probability and advised rate is compared with the truth in 1,000 simulated studies. A
// claim that follows from verdicts must never be false. A claim with a stated error probability may be false at most
// that often.
func TestNoSentenceIsFalse(t *testing.T) {
	j := &judge{map[string]int{}, map[string]int{}, map[string]string{}}
	for seed := range uint64(1000) {
		rng := rand.New(rand.NewPCG(seed, 6))
		w := bySearch(rng)
		if seed%2 == 0 {
			w = byEstimate(rng)
		}
		j.report(t, w)
	}
	nominal := map[string]float64{ // the fraction of claims of each kind that may be false; other kinds must have no false claim
		"an interval of a gain holds the truth":        0.05,
		"no better, and not distinguishable":           0.025,
		"no better, and no gain in the first sentence": 0.025,
		"no better, and under 90 % likely so":          0.1,
		"the winner's interval holds its capacity":     0.05,
		"an advised rate is carried":                   0.025,
		"a lower bound of a gain is true":              0.025,
	}
	for _, kind := range slices.Sorted(maps.Keys(j.claims)) {
		n, wrong := j.claims[kind], j.false[kind]
		t.Logf("%-55s %5d claims, %4d false", kind, n, wrong)
		p := nominal[kind]
		if allowed := p*float64(n) + 2.5*math.Sqrt(p*(1-p)*float64(n)); float64(wrong) > allowed {
			t.Errorf("%s: %d of %d claims are false, and at most %.0f may be; the first: %s", kind, wrong, n, allowed, j.examples[kind])
		}
	}
}
