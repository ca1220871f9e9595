package sim

import (
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"vllmtuner/realtime"
)

// A cell is one metric of a configuration at a rate. It has three values: measured on a real server, simulated, and
// guessed without a simulator. The guess (the field trivial) is the mean of the measured values of all configurations
// at this rate.
type cell struct {
	config, metric               string
	rate                         float64 // requests/s, or streams of a closed loop
	observed, simulated, trivial float64
}

func (c cell) err() float64 { return c.simulated/c.observed - 1 }

func (c cell) guessErr() float64 { return c.trivial/c.observed - 1 }

// A fit has all figures that show how well the profiles agree with the measurements.
type fit struct {
	options map[string]Options // the flags of each configuration
	kv      []cell             // sizes of the KV caches in GiB
	phase1  []cell
	detail  []cell // all percentiles of phase1 at 2 requests/s
	eagle   []cell
	l4      []cell
	noisy   []fit // phase1 with the profile's noise, one fit for each seed
}

// ttftLimit and tpotLimit are the latency limits of the measured sweeps, in ms.
const (
	ttftLimit = 1000.0
	tpotLimit = 60.0
)

// sweepMetrics are the metrics of the measured tables. The name of a table's file ends with its metric.
var sweepMetrics = []string{"ttft_p99_ms", "tpot_p99_ms", "output_tok_s", "max_concurrent"}

// readMeasured reads a table with a row for each rate and a column for each configuration.
func readMeasured(t testing.TB, sweep, metric string) []cell {
	t.Helper()
	rows := readCSV(t, "testdata/seed/"+sweep+"_"+metric+".csv")
	var cells []cell
	for _, row := range rows[1:] {
		for i, config := range rows[0][1:] {
			if row[i+1] != "" {
				cells = append(cells, cell{config: config, metric: metric, rate: number(t, row[0]), observed: number(t, row[i+1])})
			}
		}
	}
	return cells
}

// readConfigs returns the flags of the measured configurations, and the sizes of their KV caches.
func readConfigs(t testing.TB, o Options) (names []string, options map[string]Options, kv []cell) {
	t.Helper()
	options = map[string]Options{}
	for _, row := range readCSV(t, "testdata/seed/phase1_configs.csv")[1:] {
		name := row[1]
		o.GPUMemoryUtilization, o.MaxNumBatchedTokens, o.MaxNumSeqs = number(t, row[2]), int(number(t, row[3])), int(number(t, row[4]))
		names = append(names, name)
		options[name] = o
		kv = append(kv, cell{config: name, metric: "kv_gib", observed: number(t, row[5])})
	}
	return names, options, kv
}

// fitAll simulates all measurements and compares the results.
func fitAll(t testing.TB) fit {
	t.Helper()
	h200, l4 := profile(t, "h200-llama70b-fp8").quiet(), profile(t, "l4-qwen0.5b")
	o := h200.Defaults
	o.MaxModelLen = 16384
	names, options, kv := readConfigs(t, o)
	f := fit{options: options, kv: kv}
	eagle := options["phase1-batch16k"]
	eagle.MaxNumSeqs, eagle.SpeculativeTokens, eagle.SpeculativeMethod = 64, 3, "eagle3"
	options["phase3-eagle3-chat"] = eagle
	f.kv = append(f.kv, cell{config: "phase3-eagle3-chat", metric: "kv_gib", observed: 50.09})
	for i := range f.kv {
		f.kv[i].simulated = h200.KVGiB(options[f.kv[i].config])
	}
	trace := readTrace(t)
	simulated := map[string]map[float64]map[string]float64{}
	for _, name := range names {
		simulated[name] = sweep(t, h200, options[name], trace, 0, true)
	}
	for _, metric := range sweepMetrics {
		f.phase1 = append(f.phase1, compare(readMeasured(t, "phase1", metric), simulated)...)
	}
	f.noisy = fitNoisy(t, names, options, trace)
	f.detail = readDetail(t, "phase1", simulated)
	simulated["phase3-eagle3-chat"] = sweep(t, h200, eagle, longer(trace, 858), 0, true)
	for _, metric := range sweepMetrics {
		f.eagle = append(f.eagle, compare(only(readMeasured(t, "eagle3", metric), "phase3-eagle3-chat"), simulated)...)
	}
	f.eagle = append(f.eagle, only(readDetail(t, "eagle3", simulated), "phase3-eagle3-chat")...)
	f.l4 = fitClosedLoop(t, l4)
	return f
}

// sweep simulates a sweep that was run by hand on one server. Ten warm-up requests come at 0.5 requests/s, then all
// rates. The cache is kept from rate to rate. If gaps is set, sweep also returns percentiles of the times between
// tokens.
func sweep(t testing.TB, p *Profile, o Options, trace []traceRequest, seed uint64, gaps bool) map[float64]map[string]float64 {
	t.Helper()
	e, err := NewEngine(p, o)
	if err != nil {
		t.Fatal(err)
	}
	e.Each, e.Seed = gaps, seed
	replay(e, trace[:10], 0.5)
	out := map[float64]map[string]float64{}
	for _, rate := range []float64{0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5} {
		out[rate] = figures(replay(e, trace, rate))
	}
	return out
}

// fitNoisy returns the fit of phase1 with the noise of the profile, for eight seeds.
func fitNoisy(t testing.TB, names []string, options map[string]Options, trace []traceRequest) []fit {
	t.Helper()
	p := profile(t, "h200-llama70b-fp8")
	var fits []fit
	for seed := uint64(1); seed <= 8; seed++ {
		simulated := map[string]map[float64]map[string]float64{}
		for _, name := range names {
			simulated[name] = sweep(t, p, options[name], trace, seed, false)
		}
		var f fit
		for _, metric := range sweepMetrics {
			f.phase1 = append(f.phase1, compare(readMeasured(t, "phase1", metric), simulated)...)
		}
		fits = append(fits, f)
	}
	return fits
}

// longer makes the answers of a trace longer, so that their mean has the given number of tokens. The lengths of the
// EAGLE-3 run's answers are not known, only their mean.
func longer(trace []traceRequest, tokens float64) []traceRequest {
	var outputs []float64
	for _, q := range trace {
		outputs = append(outputs, float64(q.output))
	}
	factor := tokens / mean(outputs)
	trace = slices.Clone(trace)
	for i := range trace {
		trace[i].output = int(math.Round(float64(trace[i].output) * factor))
	}
	return trace
}

// compare sets the simulated value and the guess of each cell. The guess is the mean of the measured values at that
// rate.
func compare(cells []cell, simulated map[string]map[float64]map[string]float64) []cell {
	at := map[float64][]float64{}
	for _, c := range cells {
		at[c.rate] = append(at[c.rate], c.observed)
	}
	for i, c := range cells {
		cells[i].simulated, cells[i].trivial = simulated[c.config][c.rate][c.metric], mean(at[c.rate])
	}
	return cells
}

func only(cells []cell, config string) []cell {
	return slices.DeleteFunc(cells, func(c cell) bool { return c.config != config })
}

// readDetail reads the table of the run at 2 requests/s. In that table the metrics have readable names, such as "TTFT
// p50 (ms)".
func readDetail(t testing.TB, from string, simulated map[string]map[float64]map[string]float64) []cell {
	t.Helper()
	names := strings.NewReplacer(" p", "_p", " (ms)", "_ms", "Max Concurrent", "max_concurrent", "Output tok/s", "output_tok_s")
	rows := readCSV(t, "testdata/seed/"+from+"_baseline_detail.csv")
	var cells []cell
	for _, row := range rows[1:] {
		for i, config := range rows[0][1:] {
			metric := strings.ToLower(names.Replace(row[0]))
			if said, ok := simulated[config][2][metric]; ok {
				cells = append(cells, cell{config: config, metric: metric, rate: 2, observed: number(t, row[i+1]), simulated: said})
			}
		}
	}
	return cells
}

// fitClosedLoop simulates the sweep over concurrencies on the L4. A request has 256 tokens in and 128 out, and shares
// no prefix.
func fitClosedLoop(t testing.TB, p *Profile) []cell {
	t.Helper()
	o := p.Defaults
	o.GPUMemoryUtilization, o.MaxModelLen = 0.6, 8192
	var cells []cell
	rows := readCSV(t, "testdata/seed/l4_sweep.csv")
	for _, row := range rows[1:] {
		streams := number(t, row[0])
		e, err := NewEngine(p, o)
		if err != nil {
			t.Fatal(err)
		}
		said := figures(replayClosed(e, int(streams), 256, 128, 200+20*int(streams)))
		said["out_tok_s"] = said["output_tok_s"]
		for i, metric := range rows[0][1:] {
			cells = append(cells, cell{config: "l4", metric: metric, rate: streams, observed: number(t, row[i+1]), simulated: said[metric]})
		}
	}
	return cells
}

// errorsOf returns the absolute error of each cell with this metric. The function errorOf computes the error of one
// cell.
func errorsOf(cells []cell, metric string, errorOf func(cell) float64) []float64 {
	var errs []float64
	for _, c := range cells {
		if c.metric == metric {
			errs = append(errs, math.Abs(errorOf(c)))
		}
	}
	return errs
}

// failing returns the names of the limits that the two latencies break.
func failing(ttft, tpot float64) string {
	var broken []string
	if ttft >= ttftLimit {
		broken = append(broken, "TTFT")
	}
	if tpot >= tpotLimit {
		broken = append(broken, "TPOT")
	}
	return strings.Join(broken, "+")
}

// A verdict is one cell of the SLO matrix. It has the limits that the measured, the simulated and the guessed latencies
// break.
type verdict struct {
	config                       string
	rate                         float64
	observed, simulated, trivial string
}

// verdicts returns the SLO matrix: a verdict for each configuration and rate.
func (f fit) verdicts() []verdict {
	var vs []verdict
	for _, a := range f.phase1 {
		for _, b := range f.phase1 {
			if a.metric == "ttft_p99_ms" && b.metric == "tpot_p99_ms" && a.config == b.config && a.rate == b.rate {
				vs = append(vs, verdict{a.config, a.rate, failing(a.observed, b.observed), failing(a.simulated, b.simulated), failing(a.trivial, b.trivial)})
			}
		}
	}
	return vs
}

// same counts the cells in which the simulation breaks the same limits as the measurement.
func (f fit) same() int {
	n := 0
	for _, v := range f.verdicts() {
		if v.observed == v.simulated {
			n++
		}
	}
	return n
}

// winners returns, for each configuration, the highest rate up to which all rates pass. The function brokenLimits
// returns the limits that a verdict breaks, or "" if the verdict breaks none.
func winners(vs []verdict, brokenLimits func(verdict) string) map[string]float64 {
	best, ended := map[string]float64{}, map[string]bool{}
	for _, v := range vs {
		if brokenLimits(v) != "" {
			ended[v.config] = true
		}
		if !ended[v.config] {
			best[v.config] = v.rate
		}
	}
	return best
}

// baselines are the two runs with the baseline's flags.
var baselines = []string{"phase0", "phase1-baseline-rerun"}

// gain returns the relative change of a metric from the baseline to the changed configurations. It is the mean over
// these configurations and the rates from 0.75 to 3. If there are several baseline runs, gain uses their mean.
func (f fit) gain(metric string, figure func(cell) float64, baselineNames ...string) float64 {
	base := map[float64][]float64{}
	var gains []float64
	for _, c := range f.phase1 {
		if c.metric == metric && slices.Contains(baselineNames, c.config) {
			base[c.rate] = append(base[c.rate], figure(c))
		}
	}
	for _, c := range f.phase1 {
		if c.metric == metric && c.rate >= 0.75 && c.rate <= 3 && !slices.Contains(baselines, c.config) {
			gains = append(gains, figure(c)/mean(base[c.rate])-1)
		}
	}
	return mean(gains)
}

func observed(c cell) float64  { return c.observed }
func simulated(c cell) float64 { return c.simulated }

// fitReport is the page on how well the profiles fit.
const fitReport = "../../docs/simulator-fit.md"

// TestFit compares the profiles with measurements on real servers, and docs/simulator-fit.md with the report of the
// fit. With SIM_FIT it writes the report.
func TestFit(t *testing.T) {
	realtime.Only(t, "simulates all sweeps that were measured")
	f := fitAll(t)
	report := f.report(t)
	if os.Getenv("SIM_FIT") != "" {
		if err := os.WriteFile(fitReport, []byte(report), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if text, err := os.ReadFile(fitReport); err != nil || runtime.GOARCH == "amd64" && string(text) != report { // only amd64 has these digits: other processors fuse multiplication and addition
		t.Errorf("%s differs from this fit (%v); run make sim-fit", fitReport, err)
	}
	for _, c := range f.kv {
		if math.Abs(c.simulated-c.observed) > 0.02 {
			t.Errorf("%s: KV cache of %.2f GiB, measured %.2f", c.config, c.simulated, c.observed)
		}
	}
	for _, bar := range []struct {
		name   string
		cells  []cell
		metric string
		median float64
	}{
		{"phase1", f.phase1, "output_tok_s", 0.01},
		{"phase1", f.phase1, "ttft_p99_ms", 0.07},
		{"phase1", f.phase1, "tpot_p99_ms", 0.07},
		{"eagle3", f.eagle, "tpot_p99_ms", 0.02},
		{"l4", f.l4, "itl_p50_ms", 0.01},
	} {
		if got := percentile(errorsOf(bar.cells, bar.metric, cell.err), 50); got > bar.median {
			t.Errorf("%s %s: median error %.1f %%, want at most %g %%", bar.name, bar.metric, 100*got, 100*bar.median)
		}
	}
	if same := f.same(); same < 66 {
		t.Errorf("%d of %d cells break the same limits, want at least 66", same, len(f.verdicts()))
	}
	for metric, bound := range map[string]float64{"ttft_p99_ms": 0.02, "tpot_p99_ms": 0.02} {
		if want, got := f.gain(metric, observed, baselines...), f.gain(metric, simulated, baselines...); math.Abs(got-want) > bound {
			t.Errorf("the changed configurations have %s %+.1f %% of the baseline's in the mean, measured %+.1f %%", metric, 100*got, 100*want)
		}
	}
}
