package sweep

import (
	"fmt"
	"strconv"
	"strings"

	"vllmtuner/bench"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
)

// A figure is one number of a measured load.
type figure struct {
	title string // in tables, with its unit
	key   string // in names of files and columns
	value func(c *Config, p trial.Probe) (value float64, known bool)
	text  func(value float64) string // for people
}

// cell returns the figure as people read it, or "-" when nothing was measured.
func (f figure) cell(c *Config, p trial.Probe) string {
	if v, known := f.value(c, p); known {
		return f.text(v)
	}
	return "-"
}

// word returns the figure as programs read it, or "" when nothing was measured.
func (f figure) word(c *Config, p trial.Probe) string {
	v, known := f.value(c, p)
	switch {
	case !known:
		return ""
	case v == float64(int64(v)):
		return strconv.FormatInt(int64(v), 10)
	}
	return loadtest.Fixed(v)
}

// latencyFigure is a percentile of a latency in milliseconds. It is unknown when no request was completed.
func latencyFigure(title, key string, stats func(bench.Measurement) bench.Stats, of func(bench.Stats) float64) figure {
	return figure{title, key, func(_ *Config, p trial.Probe) (float64, bool) {
		s := stats(p.Measurement)
		return of(s), s.N > 0
	}, render.Milliseconds}
}

func numberFigure(title, key, format string, of func(bench.Measurement) float64) figure {
	return figure{title, key, func(_ *Config, p trial.Probe) (float64, bool) { return of(p.Measurement), true },
		func(v float64) string { return fmt.Sprintf(format, v) }}
}

func ttftOf(m bench.Measurement) bench.Stats { return m.TTFT }

func tpotOf(m bench.Measurement) bench.Stats { return m.TPOT }

func itlOf(m bench.Measurement) bench.Stats { return m.ITL }

func e2eOf(m bench.Measurement) bench.Stats { return m.E2E }

var (
	ttftP99       = latencyFigure("TTFT p99 (ms)", "ttft_p99_ms", ttftOf, loadtest.P99)
	tpotP99       = latencyFigure("TPOT p99 (ms)", "tpot_p99_ms", tpotOf, loadtest.P99)
	outputTokens  = numberFigure("Output tok/s", "output_tok_s", "%.0f", func(m bench.Measurement) float64 { return m.OutputThroughput })
	maxConcurrent = numberFigure("Max Concurrent", "max_concurrent", "%.0f", func(m bench.Measurement) float64 { return float64(m.PeakInFlight) })
)

// Each of gridFigures gets its own table of rates by configs, as in the reports of manual sweeps.
var gridFigures = []figure{ttftP99, tpotP99, outputTokens, maxConcurrent}

// detailFigures are the rows of the table for a single rate.
var detailFigures = []figure{
	latencyFigure("TTFT p50 (ms)", "ttft_p50_ms", ttftOf, loadtest.P50),
	latencyFigure("TTFT p95 (ms)", "ttft_p95_ms", ttftOf, loadtest.P95),
	ttftP99,
	latencyFigure("TPOT p50 (ms)", "tpot_p50_ms", tpotOf, loadtest.P50),
	latencyFigure("TPOT p95 (ms)", "tpot_p95_ms", tpotOf, loadtest.P95),
	tpotP99,
	latencyFigure("ITL p50 (ms)", "itl_p50_ms", itlOf, loadtest.P50),
	latencyFigure("ITL p99 (ms)", "itl_p99_ms", itlOf, loadtest.P99),
	maxConcurrent,
	outputTokens,
	numberFigure("Completed", "completed", "%.0f", func(m bench.Measurement) float64 { return float64(m.Completed) }),
	numberFigure("Failed", "failed", "%.0f", func(m bench.Measurement) float64 { return float64(m.Failed) }),
	{"KV cache (GiB)", "kv_cache_gib", func(c *Config, _ trial.Probe) (float64, bool) {
		gib := c.Result.Facts.KVCacheGiB
		return gib, gib > 0
	}, func(v float64) string { return fmt.Sprintf("%.2f", v) }},
}

// loopFigures are the columns of a sweep over concurrencies.
var loopFigures = []figure{
	numberFigure("req/s", "req_s", "%.1f", func(m bench.Measurement) float64 { return m.RequestThroughput }),
	numberFigure("tok/s", "out_tok_s", "%.0f", func(m bench.Measurement) float64 { return m.OutputThroughput }),
	latencyFigure("TTFT p50", "ttft_p50_ms", ttftOf, loadtest.P50),
	latencyFigure("TTFT p95", "ttft_p95_ms", ttftOf, loadtest.P95),
	latencyFigure("ITL p50", "itl_p50_ms", itlOf, loadtest.P50),
	latencyFigure("ITL p95", "itl_p95_ms", itlOf, loadtest.P95),
	latencyFigure("E2E p50", "e2e_p50_ms", e2eOf, loadtest.P50),
	latencyFigure("E2E p95", "e2e_p95_ms", e2eOf, loadtest.P95),
}

// levelText is a level in the first column of a table.
func levelText(l trial.Level) string {
	if l.Streams > 0 {
		return strconv.Itoa(l.Streams)
	}
	return loadtest.RateText(l.Rate)
}

// verdictCell is a verdict in a table of a sweep: PASS, or FAIL (TTFT+TPOT).
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
