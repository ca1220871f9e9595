package simload

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/stat"

	"vllmtuner/bench"
)

// A report is the content of docs/evidence/capacity.md, which `make bench-capacity` writes.
type report struct {
	commit     string
	seed, reps int
	studies    []study
	parts      []part
	leftOut    []string // worlds whose true capacity was not found, and why
	verdicts   []verdictRow
}

func rms(values []float64) float64 { return floats.Norm(values, 2) / math.Sqrt(float64(len(values))) }

func mean(values []float64) float64 { return stat.Mean(values, nil) }

// A methodFigures has the figures of one method over several worlds. All worlds have the same weight.
type methodFigures struct {
	bias, sd, robust, rmse                   []float64 // one value for each world
	probes, requests, window, leadIn, runOut []float64
	hits, intervals, least, most             int
}

func (r report) methodFigures(method int, in func(world) bool) (o methodFigures) {
	for _, s := range r.studies {
		if !in(s.world) {
			continue
		}
		o.take(s.results[method], s.capacity)
	}
	return o
}

func (o *methodFigures) take(f methodResult, truth float64) {
	errors := f.errors(truth)
	bias, sd := meanSD(errors)
	o.bias, o.sd = append(o.bias, bias), append(o.sd, sd)
	o.robust, o.rmse = append(o.robust, robustSD(errors)), append(o.rmse, rms(errors))
	o.probes = append(o.probes, f.mean(func(a answer) float64 { return float64(a.probes) }))
	o.requests = append(o.requests, f.mean(func(a answer) float64 { return float64(a.requests) }))
	o.window = append(o.window, f.mean(func(a answer) float64 { return a.window.Seconds() }))
	o.leadIn = append(o.leadIn, f.mean(func(a answer) float64 { return a.leadIn.Seconds() }))
	o.runOut = append(o.runOut, f.mean(func(a answer) float64 { return a.runOut.Seconds() }))
	hits, intervals := f.covered(truth)
	least, most := f.bounds()
	o.hits, o.intervals, o.least, o.most = o.hits+hits, o.intervals+intervals, o.least+least, o.most+most
}

// row formats the figures as one line of a Markdown table, without the first cell.
func (o methodFigures) row() string {
	coverage := "–"
	if o.intervals > 0 {
		p := float64(o.hits) / float64(o.intervals)
		coverage = fmt.Sprintf("%.1f ± %.1f", 100*p, 100*math.Sqrt(p*(1-p)/float64(o.intervals)))
	}
	total := mean(o.window) + mean(o.leadIn) + mean(o.runOut)
	return fmt.Sprintf("%.1f | %.0f | %.0f | %.0f | %.0f | %.0f | %+.1f | %.1f | %.1f | %.1f | %s | %d/%d |",
		mean(o.probes), mean(o.requests), total, mean(o.window), mean(o.leadIn), mean(o.runOut),
		mean(o.bias), rms(o.sd), rms(o.robust), rms(o.rmse), coverage, o.least, o.most)
}

const figuresHead = "probes | requests | s | window | lead-in | run-out | bias | SD | robust | RMSE | coverage | ≥/≤ |\n" +
	"|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"

func (r report) markdown() string {
	var b strings.Builder
	b.WriteString(capacityHead)
	fmt.Fprintf(&b, "Commit %s, random worlds of seed %d, %d repetitions.\n", r.commit, r.seed, r.reps)
	for _, why := range r.leftOut {
		fmt.Fprintf(&b, "Left out: %s.\n", why)
	}
	r.summary(&b)
	r.matrix(&b)
	r.bought(&b)
	r.forecasts(&b)
	r.truths(&b)
	r.judged(&b)
	r.details(&b)
	return b.String()
}

const capacityHead = `# How well the capacity of one server is found

Read here how far a measured capacity may be from the true one, with our searches and with the methods of other tools, and how long each
method takes.

Written by ` + "`make bench-capacity`" + `. All of it is simulated, in virtual time: every load goes through the code of a real trial.

- truth: the rate at which 1 % of the requests break a limit in the long run, for the limit that breaks first. The *methods*
  are the ways to find a capacity that are listed below. The truth has the same state of the prefix cache before each load as they do
  (the *protocol*) and the same workload (the *population*), but other random requests and arrivals (*draws*). Log-linear interpolation
  between six rates; s.e. between draws.
- Each repetition has its own requests, order, arrivals and engine noise. All methods of one repetition have the same ones.
- Errors are 100 · ln(answer / truth). SD and robust SD (from the median absolute deviation) are within a world. For several worlds the
  table has the mean of their biases, and the root mean squares of SD, robust SD and RMSE. Seconds, probes and requests are means.
- s = window + lead-in + run-out. It does not include the start and the priming of the cache, which all methods need alike. A probe
  that ends early ends its window early.
- coverage: how often the 95 % interval contains the truth, with the binomial standard error, if a method gives an interval.
- ≥/≤: answers that are only *at least* or *at most*. They count as the rate that they name.
- Only our methods get a hint. It is lognormal about the truth with a spread of 0.35. In the rows "from a tenth" and "from four times"
  it is also too low or too high by that factor.

The methods:

- ours, search: a trial, with windows of max(300 requests, 120 s). ours, confirmation: the same with windows of max(1000 requests, 240 s).
  ours, ±5 %: windows as in a confirmation, until the interval is ±5 %. The lead-in is the usual one: twice the time that an answer may
  take, and at least 30 s. With a carried prefix cache it is four times that time, and at least 60 s.
- ours, as bisection: a search whose windows are scaled, so that together they last as long as in bisection. The other rivals take
  longer than our search does.
- sweep: a grid of 12 rates, which each repetition shifts by a part of a step. All 12 rates are measured, with 300 requests each, as
  vllm bench serve sends them (no lead-in, no run-out). The answer is the last rate before the first rate that fails.
- bisection: searches the last rate of that grid that passes, with probes as in the sweep.
- AIPerf, n: its planner smooth_isotonic on the request rate. The rate is doubled from the grid's lowest rate until it fails; then three
  probes are taken inside. Each further probe is where PCHIP through the isotonic regression of the p99 crosses the limit, until the
  bracket is within 5 %. A probe has n requests (its preset coarse) after 60 s, and no run-out. The answer is the highest rate that passed.
- closed loop: the number of streams is doubled until a limit breaks, then bisected to 5 %. A load has 300 requests, and at least ten for
  each stream, after two for each stream that are not counted. The answer is the throughput at the most streams that passed.

The grids have 12 rates from 0.25 to 25 req/s (H200), 0.5 to 50 (L4, small-fast) and 0.2 to 50 (random worlds).

`

// summary writes three tables with one line per method: for worlds without prefix reuse, for worlds with prefix reuse,
// and for all worlds.
func (r report) summary(b *strings.Builder) {
	for _, group := range []struct {
		name string
		in   func(world) bool
	}{
		{"without prefix reuse", func(w world) bool { return !w.reuses() }},
		{"with prefix reuse", world.reuses},
		{"all", func(world) bool { return true }},
	} {
		n := 0
		for _, s := range r.studies {
			if group.in(s.world) {
				n++
			}
		}
		if n == 0 {
			continue
		}
		fmt.Fprintf(b, "\n## Worlds: %s (%d)\n\n| method | %s", group.name, n, figuresHead)
		for i, f := range r.studies[0].results {
			fmt.Fprintf(b, "| %s | %s\n", f.method, r.methodFigures(i, group.in).row())
		}
	}
}

// matrix writes the RMSE of the main methods by world.
func (r report) matrix(b *strings.Builder) {
	b.WriteString("\n## RMSE by world, %\n\n| world |")
	lines := "|---|"
	const shown = 7 // our search in three settings, and the four rivals
	for _, f := range r.studies[0].results[:shown] {
		fmt.Fprintf(b, " %s |", f.method)
		lines += "---|"
	}
	b.WriteString("\n" + lines + "\n")
	for _, s := range r.studies {
		fmt.Fprintf(b, "| %s |", s.name)
		for _, f := range s.results[:shown] {
			fmt.Fprintf(b, " %.1f |", rms(f.errors(s.capacity)))
		}
		b.WriteString("\n")
	}
}

const truthsHead = `
## The worlds and their truths

The limit that breaks first is bold. steep: by how many per cent the share of broken requests grows if the rate grows by 1 %.
requests: their number at each of the six rates.

| world | what | cache | req/s | s.e. % | TTFT / TPOT, ms | steep | requests |
|---|---|---|---|---|---|---|---|
`

// truths writes one line about each world and its true capacity.
func (r report) truths(b *strings.Builder) {
	b.WriteString(truthsHead)
	for _, s := range r.studies {
		fmt.Fprintf(b, "| %s | %s | %s | %.4g | %.2f | %s | %.0f | %d |\n",
			s.name, s.about, s.cache, s.capacity, 100*s.se, s.promises(), s.slope, s.truth.requests)
	}
}

// promises writes the limits in milliseconds; the limit that breaks first is bold.
func (s study) promises() string {
	var words []string
	for i, l := range s.slo.Limits {
		word := fmt.Sprintf("%.3g", l.Max.Seconds()*1000)
		if i == s.limit {
			word = "**" + word + "**"
		}
		words = append(words, word)
	}
	return strings.Join(words, " / ")
}

const verdictsHead = `
## How often one window passes

Long stationary loads, cut into windows. independent: how often a window would pass if its requests were independent (binomial
distribution). design: the SD of the windows' shares divided by the SD for independent requests. A binomial interval is too narrow
by this factor.

| world | true share % | here % | window | requests | windows | passes | independent | design |
|---|---|---|---|---|---|---|---|---|
`

// judged writes how often a window of each length passes.
func (r report) judged(b *strings.Builder) {
	if len(r.verdicts) == 0 {
		return
	}
	b.WriteString(verdictsHead)
	for _, v := range r.verdicts {
		fmt.Fprintf(b, "| %s | %.4g | %.2f | %s | %.0f | %d | %.2f | %.2f | %.1f |\n",
			v.world, 100*v.goal, 100*v.share, v.window.name, v.requests, v.windows, v.passed, v.binomial, v.design)
	}
}

// details writes every figure of every world.
func (r report) details(b *strings.Builder) {
	b.WriteString("\n## Every world\n")
	for _, s := range r.studies {
		fmt.Fprintf(b, "\n### %s: %.4g req/s\n\n| method | %s", s.name, s.capacity, figuresHead)
		for _, f := range s.results {
			var o methodFigures
			o.take(f, s.capacity)
			fmt.Fprintf(b, "| %s | %s\n", f.method, o.row())
		}
	}
}

// A verdictRow has the verdicts on all windows that have one length and one rate.
type verdictRow struct {
	world    string
	goal     float64 // long-run share of requests that break the tightest limit
	share    float64 // the same share, measured in these windows
	window   window
	requests float64 // number of requests in a window
	windows  int
	passed   float64 // share of the windows that pass
	binomial float64 // share of windows that would pass if requests were independent
	design   float64 // SD of the windows' shares, divided by the SD for independent requests
}

// A window is a rule for the length of a measured window: minimum numbers of requests and of seconds.
type window struct {
	name     string
	requests int
	seconds  float64
}

var windows = []window{{"300", 300, 0}, {"max(300, 120 s)", 300, 120}, {"max(1000, 240 s)", 1000, 240}}

func (w window) at(rate float64) int { return max(w.requests, int(math.Ceil(rate*w.seconds))) }

// brokenShares lists long-run shares of broken requests. For each share, the passing windows are counted.
var brokenShares = []float64{0.005, 0.0075, 0.01, 0.015, 0.02}

// verdicts cuts long stationary loads into windows and judges each window.
func verdicts(s study, draws int) ([]verdictRow, error) {
	load := stretch{20000, 300 * time.Second}
	var rows []verdictRow
	for _, share := range brokenShares {
		rate := s.rateFor(share)
		all := make([][]bench.Sample, draws)
		w := s.world
		w.guess = s.capacity
		err := inParallel(draws, func(i int) error {
			run, err := w.runStretch(rate, verdictDraws+i, load)
			all[i] = run.Samples
			return err
		})
		if err != nil {
			return nil, err
		}
		for _, win := range windows {
			rows = append(rows, s.judge(all, share, win, win.at(rate)))
		}
	}
	return rows, nil
}

func (s study) judge(runs [][]bench.Sample, share float64, win window, n int) verdictRow {
	row := verdictRow{world: s.name, goal: share, window: win, requests: float64(n)}
	var shares []float64
	for _, samples := range runs {
		for cut := range slices.Chunk(samples, n) {
			if len(cut) < n {
				continue
			}
			v := s.slo.Judge(cut, n, math.MaxInt64)
			if v.Pass {
				row.passed++
			}
			shares = append(shares, float64(v.Checks[s.limit].Broken)/float64(n))
		}
	}
	row.windows = len(shares)
	row.passed /= float64(len(shares))
	var sd float64
	row.share, sd = meanSD(shares)
	row.binomial = atMostBroken(n, share)
	row.design = sd / math.Sqrt(row.share*(1-row.share)/float64(n))
	return row
}

// atMostBroken returns the probability that at most 1 % of n independent requests break a limit. The parameter share is
// the probability that a single request breaks the limit.
func atMostBroken(n int, share float64) float64 {
	sum, term := 0.0, math.Pow(1-share, float64(n))
	for k := range int(goal*float64(n)+1e-9) + 1 {
		sum += term
		term *= float64(n-k) / float64(k+1) * share / (1 - share)
	}
	return sum
}
