package simload

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
)

// cacheWorlds returns the worlds whose requests find a part of their prompts in the prefix cache. It sets guess in each
// world to about the long-run capacity.
func cacheWorlds(t testing.TB) []world {
	t.Helper()
	chosen := []world{named(t, "h200-phase1"), named(t, "h200-production"), named(t, "small-shared")}
	for i, capacity := range []float64{1.98, 0.755, 9.34} {
		chosen[i].guess = capacity
	}
	return chosen
}

// A protocolCell is one row of the table: how the cache is filled, and how a probe measures.
type protocolCell struct {
	priming primeAmount
	leadIn  time.Duration
	runOut  bool
}

// A primeAmount says how much is sent before the first probe.
type primeAmount string

const (
	unprimed primeAmount = "none"
	half     primeAmount = "half KV"
	once     primeAmount = "once"
	twice    primeAmount = "twice"
)

// defaultCell describes how trials prime a server and probe it. Most other cells differ from defaultCell in one
// setting.
var defaultCell = protocolCell{once, 60 * time.Second, true}

// longCell has such a long lead-in that a cold start no longer has an effect. Every other cell is compared with
// longCell.
var longCell = protocolCell{twice, 300 * time.Second, true}

// cells returns the cells of the table without longCell.
func cells() []protocolCell {
	var all []protocolCell
	for _, s := range []time.Duration{0, 15, 30, 60, 120} {
		all = append(all, protocolCell{once, s * time.Second, true})
	}
	for _, p := range []primeAmount{unprimed, half, twice} {
		all = append(all, protocolCell{p, defaultCell.leadIn, true})
	}
	return append(all, protocolCell{unprimed, 0, true}, protocolCell{unprimed, 120 * time.Second, true}, protocolCell{once, defaultCell.leadIn, false})
}

// A probeResult is the result of one probe.
type probeResult struct {
	broken, requests int
	ttft, tpot       bench.Stats
	hits, queries    float64 // prompt tokens that the window's requests found and looked up in the prefix cache
	priming, probe   time.Duration
}

// primed starts a server and primes it. The draw (a number) decides the requests, their arrivals and the engine's
// noise.
func (w world) primed(ctx context.Context, p primeAmount, draw int) (trial.Server, trial.Load, time.Duration, error) {
	rig := &Rig{Profile: w.profile}
	server, load, err := rig.Start(ctx, trial.Launch{Number: draw + 1, Args: w.args})
	if err != nil || p == unprimed {
		return server, load, 0, err
	}
	// trial.Runner primes in the same way. For a finite workload, the runner sends one pass. For an endless workload,
	// it stops when as many tokens are written as the KV cache holds.
	goal, n := map[primeAmount]float64{half: 0.5, once: 1, twice: 2}[p], math.MaxInt
	if w.cache == trial.Primed && p != half {
		n = int(goal) * w.source.Len()
	}
	stop := func(time.Duration, []bench.Sample) bool {
		c, _ := server.Counters(ctx) // the simulator returns no error
		return n == math.MaxInt && c.PromptTokens-c.PrefixHits+c.GenerationTokens > goal*float64(server.Facts().KVCacheTokens)
	}
	pass := workload.Pass{Source: w.source, Stream: workload.PrimeStream.Draw(draw), Rate: primeRate(w.guess), N: n}
	run, err := load.Run(ctx, pass.Schedule(), stop)
	return server, load, run.Elapsed, err
}

// read makes one probe as the cell c says, and returns its result.
func (w world) read(ctx context.Context, c protocolCell, rate float64, draw int) (probeResult, error) {
	server, load, took, err := w.primed(ctx, c.priming, draw)
	if err != nil {
		return probeResult{}, err
	}
	plan := workload.Plan{Source: w.source, Rate: rate, Draw: draw, LeadIn: c.leadIn, Window: 120 * time.Second, MinRequests: 300}
	n, length := plan.Counted()
	schedule := plan.Schedule()
	if !c.runOut {
		schedule = workload.WithoutRunOut(schedule)
	}
	var before, after struct{ hits, queries float64 }
	count := func(now time.Duration, _ []bench.Sample) bool { // called once a virtual second
		totals, _ := server.Counters(ctx) // the simulator returns no error
		if now < c.leadIn+time.Second {
			before.hits, before.queries = totals.PrefixHits, totals.PrefixQueries
		}
		if now < c.leadIn+length+time.Second {
			after.hits, after.queries = totals.PrefixHits, totals.PrefixQueries
		}
		return false
	}
	run, err := load.Run(ctx, schedule, count)
	if err != nil {
		return probeResult{}, err
	}
	r := probeResult{requests: n, priming: took, probe: run.Elapsed, hits: after.hits - before.hits, queries: after.queries - before.queries}
	m := bench.Measure(run, bench.Scope{Rate: rate, Start: c.leadIn, Length: length})
	r.ttft, r.tpot = m.TTFT, m.TPOT
	checks := w.slo.Judge(run.Samples, n, run.Elapsed).Checks
	for i := range n {
		if slices.ContainsFunc(checks, func(c slo.Check) bool { return c.Each[i] == slo.Over }) {
			r.broken++
		}
	}
	return r, nil
}

// measureAll measures a cell at each rate with each draw. The results are indexed by rate and draw.
func (w world) measureAll(t testing.TB, c protocolCell, rates []float64, draws int) [][]probeResult {
	t.Helper()
	all := make([][]probeResult, len(rates))
	for i := range all {
		all[i] = make([]probeResult, draws)
	}
	err := inParallel(len(rates)*draws, func(i int) (err error) {
		all[i%len(rates)][i/len(rates)], err = w.read(t.Context(), c, rates[i%len(rates)], i/len(rates))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// share returns the share of the requests that break a limit. The parameter leftOut is the number of a draw that does
// not count; -1 means that all draws count.
func share(results []probeResult, leftOut int) float64 {
	broken, n := 0.5, 1.0 // add half a broken request, so that no share is zero
	for i, r := range results {
		if i != leftOut {
			broken, n = broken+float64(r.broken), n+float64(r.requests)
		}
	}
	return broken / n
}

// jackknifed returns a figure of all draws and its standard error. The error comes from leaving out one draw at a time.
func jackknifed(draws int, figure func(leftOut int) float64) (value, se float64) {
	values := make([]float64, draws)
	for i := range values {
		values[i] = figure(i)
	}
	_, sd := meanSD(values)
	return figure(-1), sd * float64(draws-1) / math.Sqrt(float64(draws))
}

// excess compares a figure of one cell's probes with the same figure of longCell's probes. It returns by how many per
// cent the cell's figure is higher than longCell's, and the standard error of this percentage.
func excess(results, longResults []probeResult, figure func(probeResult) float64) (percent, se float64) {
	return jackknifed(len(results), func(leftOut int) float64 {
		a, b := 0.0, 0.0
		for i := range results {
			if i != leftOut {
				a, b = a+figure(results[i]), b+figure(longResults[i])
			}
		}
		return 100 * (a/b - 1)
	})
}

// A protocolStudy has the results of all cells of one world.
type protocolStudy struct {
	world world
	rates []float64
	draws int
	long  [][]probeResult
	slope float64 // by how many per cent the share of broken requests grows when the rate grows by 1 %
}

func newProtocolStudy(t testing.TB, w world, draws int) protocolStudy {
	t.Helper()
	s := protocolStudy{world: w, rates: []float64{1.02 * w.guess, 1.08 * w.guess}, draws: draws}
	s.long = w.measureAll(t, longCell, s.rates, draws)
	s.slope = math.Log(share(s.long[1], -1)/share(s.long[0], -1)) / math.Log(s.rates[1]/s.rates[0])
	return s
}

// capacityBias returns by how many per cent the capacity is too high when a measurement follows a cell's protocol.
// capacityBias divides the error in the share of broken requests by the slope, and takes the mean over the rates.
func (s protocolStudy) capacityBias(results [][]probeResult) (percent, se float64) {
	return jackknifed(s.draws, func(leftOut int) float64 {
		sum := 0.0
		for i := range s.rates {
			sum += math.Log(share(s.long[i], leftOut) / share(results[i], leftOut))
		}
		return 100 * sum / float64(len(s.rates)) / s.slope
	})
}

// gpuSeconds returns two mean server times of a cell. The result priming is the time of the priming, which a trial has
// once. The result probe is the time of each probe.
func gpuSeconds(results [][]probeResult) (priming, probe float64) {
	n := 0.0
	for _, rate := range results {
		for _, r := range rate {
			priming, probe, n = priming+r.priming.Seconds(), probe+r.probe.Seconds(), n+1
		}
	}
	return priming / n, probe / n
}

// hitPoints returns by how many percentage points the hit rate in a cell's windows is higher than in longCell's
// windows.
func hitPoints(results, longResults []probeResult) (points, se float64) {
	return jackknifed(len(results), func(leftOut int) float64 {
		sum, n := 0.0, 0.0
		for i := range results {
			if i != leftOut {
				sum, n = sum+results[i].hits/results[i].queries-longResults[i].hits/longResults[i].queries, n+1
			}
		}
		return 100 * sum / n
	})
}

// line returns the table's row for a cell.
func (s protocolStudy) line(c protocolCell, results [][]probeResult) string {
	bias, se := s.capacityBias(results)
	figures := func(figure func(probeResult) float64) string {
		v, se := excess(results[0], s.long[0], figure)
		return fmt.Sprintf("%+.1f ± %.1f", v, se)
	}
	hit, hitSE := hitPoints(results[0], s.long[0])
	priming, probe := gpuSeconds(results)
	runOut := "yes"
	if !c.runOut {
		runOut = "no"
	}
	return fmt.Sprintf("| %s | %.0f | %s | %.0f + %.0f | %.2f %% | %+.1f ± %.1f | %s | %s | %s | %s | %+.1f ± %.1f |", c.priming, c.leadIn.Seconds(),
		runOut, priming, probe, 100*share(results[0], -1), bias, se,
		figures(func(r probeResult) float64 { return r.ttft.P50 }), figures(func(r probeResult) float64 { return r.ttft.P99 }),
		figures(func(r probeResult) float64 { return r.tpot.P50 }), figures(func(r probeResult) float64 { return r.tpot.P99 }), hit, hitSE)
}

// ranked lists the values of --gpu-memory-utilization that a protocol must rank.
var ranked = []string{"0.85", "0.9", "0.95", "0.97"}

// rankRate is the rate at which the ranked configurations are measured, as a multiple of the default's capacity. The
// rate is above the capacity of some configurations and below the capacity of others.
const rankRate = 1.12

// rank measures the configurations at one rate and orders them by their share of broken requests, the best first. It
// also takes each pair of neighbours in trueOrder. The result correct is how often one draw ranks such a pair
// correctly, in per cent. A tie counts half.
func (w world) rank(t testing.TB, c protocolCell, rate float64, draws int, trueOrder []string) (order []string, shares []float64, correct float64) {
	t.Helper()
	by := make(map[string][]probeResult)
	for _, utilization := range ranked {
		config := w
		config.args = append(slices.Clone(w.args), "--gpu-memory-utilization", utilization)
		by[utilization] = config.measureAll(t, c, []float64{rate}, draws)[0]
	}
	order = slices.Clone(ranked)
	slices.SortStableFunc(order, func(a, b string) int { return cmp.Compare(share(by[a], -1), share(by[b], -1)) })
	for _, u := range order {
		shares = append(shares, share(by[u], -1))
	}
	if trueOrder == nil {
		trueOrder = order
	}
	pairs := 0.0
	for i := range trueOrder[1:] {
		for d := range draws {
			better, worse := by[trueOrder[i]][d], by[trueOrder[i+1]][d]
			pairs++
			switch {
			case better.broken < worse.broken:
				correct++
			case better.broken == worse.broken:
				correct += 0.5
			}
		}
	}
	return order, shares, 100 * correct / pairs
}

// TestCacheProtocols writes the cost of each part of a cache protocol, and the error of a measurement that leaves the part out.
func TestCacheProtocols(t *testing.T) {
	path := os.Getenv("CACHE_PROTOCOLS")
	if path == "" {
		t.Skip("takes minutes: make bench-cache")
	}
	draws := max(2, setting(t, "CACHE_DRAWS", 64))
	described, err := exec.CommandContext(t.Context(), "git", "describe", "--always", "--tags", "--dirty").Output()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, w := range cacheWorlds(t) {
		s := newProtocolStudy(t, w, draws)
		fmt.Fprintf(&b, "\n### %s\n\nAt %.3g and %.3g req/s %.2f and %.2f %% of the requests break a limit; a 1 %% higher rate raises this share by %.0f %%.\n\n",
			w.name, s.rates[0], s.rates[1], 100*share(s.long[0], -1), 100*share(s.long[1], -1), s.slope)
		b.WriteString("| priming | lead-in | run-out | GPU s | broken | capacity | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | hits |\n")
		b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
		for _, c := range append(cells(), longCell) {
			line := s.line(c, w.measureAll(t, c, s.rates, draws))
			t.Log(w.name, line)
			b.WriteString(line + "\n")
		}
	}
	w := cacheWorlds(t)[0]
	fmt.Fprintf(&b, "\n### Which configuration is the best\n\n%s with utilization %s, all at %.3g req/s: their order by the share of broken requests, and how often one draw\n"+
		"tells neighbours in the true order.\n\n| priming | lead-in | order, with shares | right, %% of draws |\n|---|---|---|---|\n", w.name, strings.Join(ranked, ", "), rankRate*w.guess)
	var truth []string
	for _, c := range []protocolCell{
		longCell, {unprimed, 0, true}, {unprimed, 60 * time.Second, true}, {once, 0, true}, {once, 30 * time.Second, true}, defaultCell,
	} {
		order, shares, right := w.rank(t, c, rankRate*w.guess, draws, truth)
		if c == longCell {
			truth = order
		}
		var words []string
		for i, u := range order {
			words = append(words, fmt.Sprintf("%s (%.2f %%)", u, 100*shares[i]))
		}
		line := fmt.Sprintf("| %s | %.0f | %s | %.0f |", c.priming, c.leadIn.Seconds(), strings.Join(words, ", "), right)
		t.Log(line)
		b.WriteString(line + "\n")
	}
	intro := fmt.Sprintf(protocolIntro, strings.TrimSpace(string(described)), draws)
	text, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	_, conclusion, _ := strings.Cut(string(text), conclusionHeading) // keep the conclusion, which people write
	writePage(t, path, intro+b.String()+"\n"+conclusionHeading+conclusion)
}

const conclusionHeading = "## Conclusion\n"

const protocolIntro = "# What a cache protocol costs, and how long its parts must be\n\n" +
	"This page decides how a trial fills the prefix cache before it measures, and how long the lead-in and the run-out of a probe are. The\n" +
	"[conclusion](#conclusion) is at its end.\n\n" +
	"`make bench-cache` at %s, %d draws of requests and arrivals in each cell, simulated.\n\n" +
	"Each probe counts the requests of 120 s, and at least 300, after the lead-in of its row in seconds. Before, the server was primed as the\n" +
	"row says: not at all, until half of the KV cache was written, once as trials do it, or twice. Every row counts the same requests at the\n" +
	"same times as the long probe of the last row. So a difference comes from the protocol and not from the draw. ± is one standard error.\n" +
	"\n" +
	"- *GPU s*: the priming, once in a trial, and each probe with lead-in and run-out.\n" +
	"- *broken*: the share of requests over a limit, at the lower of two rates near the capacity.\n" +
	"- *capacity*: by how many %% the capacity reads too high, computed from the shares at both rates and their slope.\n" +
	"- *TTFT* and *TPOT*: by how many %% the median and the p99 are too high, as the mean of the draws.\n" +
	"- *hits*: by how many percentage points the hit rate of the window is too high.\n"
