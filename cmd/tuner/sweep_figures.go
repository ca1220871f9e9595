package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/bench"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// A figure is one number of a measured load.
type figure struct {
	title string // in tables, with its unit
	key   string // in names of files and columns
	value func(c *sweptConfig, p trial.Probe) (value float64, known bool)
	text  func(value float64) string // for people
}

// cell is the figure for people, and nothing where nothing was measured.
func (f figure) cell(c *sweptConfig, p trial.Probe) string {
	if v, known := f.value(c, p); known {
		return f.text(v)
	}
	return "-"
}

// word is the figure for programs.
func (f figure) word(c *sweptConfig, p trial.Probe) string {
	v, known := f.value(c, p)
	switch {
	case !known:
		return ""
	case v == float64(int64(v)):
		return strconv.FormatInt(int64(v), 10)
	}
	return ms(v)
}

// latencyFigure is a percentile of a latency in milliseconds; none when nothing was completed.
func latencyFigure(title, key string, stats func(bench.Measurement) bench.Stats, of func(bench.Stats) float64) figure {
	return figure{title, key, func(_ *sweptConfig, p trial.Probe) (float64, bool) {
		s := stats(p.Measurement)
		return of(s), s.N > 0
	}, short}
}

func numberFigure(title, key, format string, of func(bench.Measurement) float64) figure {
	return figure{title, key, func(_ *sweptConfig, p trial.Probe) (float64, bool) { return of(p.Measurement), true },
		func(v float64) string { return fmt.Sprintf(format, v) }}
}

func ttftOf(m bench.Measurement) bench.Stats { return m.TTFT }
func tpotOf(m bench.Measurement) bench.Stats { return m.TPOT }
func itlOf(m bench.Measurement) bench.Stats  { return m.ITL }
func e2eOf(m bench.Measurement) bench.Stats  { return m.E2E }
func p95(s bench.Stats) float64              { return s.P95 }

var (
	ttftP99       = latencyFigure("TTFT p99 (ms)", "ttft_p99_ms", ttftOf, p99)
	tpotP99       = latencyFigure("TPOT p99 (ms)", "tpot_p99_ms", tpotOf, p99)
	outputTokens  = numberFigure("Output tok/s", "output_tok_s", "%.0f", func(m bench.Measurement) float64 { return m.OutputThroughput })
	maxConcurrent = numberFigure("Max Concurrent", "max_concurrent", "%.0f", func(m bench.Measurement) float64 { return float64(m.PeakInFlight) })
)

// gridFigures have a table each over rates and configs, as the reports of manual sweeps have them.
var gridFigures = []figure{ttftP99, tpotP99, outputTokens, maxConcurrent}

// detailFigures are those of one rate.
var detailFigures = []figure{
	latencyFigure("TTFT p50 (ms)", "ttft_p50_ms", ttftOf, median),
	latencyFigure("TTFT p95 (ms)", "ttft_p95_ms", ttftOf, p95),
	ttftP99,
	latencyFigure("TPOT p50 (ms)", "tpot_p50_ms", tpotOf, median),
	latencyFigure("TPOT p95 (ms)", "tpot_p95_ms", tpotOf, p95),
	tpotP99,
	latencyFigure("ITL p50 (ms)", "itl_p50_ms", itlOf, median),
	latencyFigure("ITL p99 (ms)", "itl_p99_ms", itlOf, p99),
	maxConcurrent,
	outputTokens,
	numberFigure("Completed", "completed", "%.0f", func(m bench.Measurement) float64 { return float64(m.Completed) }),
	numberFigure("Failed", "failed", "%.0f", func(m bench.Measurement) float64 { return float64(m.Failed) }),
	{"KV cache (GiB)", "kv_cache_gib", func(c *sweptConfig, _ trial.Probe) (float64, bool) {
		gib := c.result.Facts.KVCacheGiB
		return gib, gib > 0
	}, func(v float64) string { return fmt.Sprintf("%.2f", v) }},
}

// loopFigures are the columns of a sweep over concurrencies.
var loopFigures = []figure{
	numberFigure("req/s", "req_s", "%.1f", func(m bench.Measurement) float64 { return m.RequestThroughput }),
	numberFigure("tok/s", "out_tok_s", "%.0f", func(m bench.Measurement) float64 { return m.OutputThroughput }),
	latencyFigure("TTFT p50", "ttft_p50_ms", ttftOf, median),
	latencyFigure("TTFT p95", "ttft_p95_ms", ttftOf, p95),
	latencyFigure("ITL p50", "itl_p50_ms", itlOf, median),
	latencyFigure("ITL p95", "itl_p95_ms", itlOf, p95),
	latencyFigure("E2E p50", "e2e_p50_ms", e2eOf, median),
	latencyFigure("E2E p95", "e2e_p95_ms", e2eOf, p95),
}

// at returns what was measured at a level.
func (c *sweptConfig) at(l trial.Level) (trial.Probe, bool) {
	i := slices.IndexFunc(c.probes, func(p trial.Probe) bool { return p.Level() == l })
	if i < 0 {
		return trial.Probe{}, false
	}
	return c.probes[i], true
}

// highest is the highest load of the grid that kept the SLO.
func (c *sweptConfig) highest() capacity.Capacity {
	found, _ := capacity.Highest(trial.Steps(c.probes))
	return found
}

// below are the lower loads that broke it all the same.
func (c *sweptConfig) below() []float64 {
	_, below := capacity.Highest(trial.Steps(c.probes))
	return below
}

// trouble says why a config's server failed; "" when it did not.
func (c *sweptConfig) trouble() string {
	r := c.result
	if r.Outcome == trial.Measured || r.Class == "" && r.Outcome == "" {
		return ""
	}
	words := serverctl.Words(r.Class, r.Cause)
	what := "failed under load"
	if r.Facts.StartUp == 0 {
		what = "cannot start"
	}
	return strings.TrimSuffix(what+": "+strings.TrimPrefix(words+": "+r.Evidence, ": "), ": ")
}

// found is what came of a config in a few words.
func (c *sweptConfig) found(closed bool) string {
	if trouble := c.trouble(); trouble != "" {
		return trouble
	}
	return highestText(trial.Steps(c.probes), closed)
}

// highestText says what the highest load of a grid within the SLO is, and where the verdicts do not fall in line.
func highestText(steps []capacity.Step, closed bool) string {
	h, below := capacity.Highest(steps)
	switch {
	case h.Limited != "" && !h.Met():
		return "no load is known to be within the SLO: " + h.Why
	case h.Bound == "":
		return h.Why
	case !h.Met():
		return "no load within the SLO: " + h.Why
	}
	text := fmt.Sprintf("%s is the highest within the SLO; %s", loadText(h.Rate, closed), h.Why)
	if h.Limited != "" {
		text = fmt.Sprintf("%s is within the SLO, and may not be the highest: %s", loadText(h.Rate, closed), h.Why)
	}
	for _, load := range below {
		text += fmt.Sprintf("; but %s failed", loadText(load, closed))
	}
	return text
}

// loadText names a load of the grid.
func loadText(load float64, closed bool) string {
	if closed {
		return fmt.Sprintf("concurrency %g", load)
	}
	return fmt.Sprintf("%s req/s", rateText(load))
}

// rateText is a rate as reports of sweeps write it: 0.50, and 0.125.
func rateText(rate float64) string {
	if text := strconv.FormatFloat(rate, 'f', 2, 64); round(rate*100) == float64(int64(round(rate*100))) {
		return text
	}
	return strconv.FormatFloat(rate, 'f', -1, 64)
}

// levelText is a level as the first column of a table has it.
func levelText(l trial.Level) string {
	if l.Streams > 0 {
		return strconv.Itoa(l.Streams)
	}
	return rateText(l.Rate)
}

// verdictCell is a verdict as reports of sweeps write it: PASS, or FAIL (TTFT+TPOT).
func verdictCell(p trial.Probe) string {
	v := p.Verdict
	switch {
	case v.ClientLimited != "":
		return "client-limited"
	case v.Pass:
		return "PASS"
	case p.Measurement.Completed == 0:
		return "FAIL (none done)"
	}
	return "FAIL (" + strings.Join(v.Broken(), "+") + ")"
}
