package sweep

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/bench"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/slo"
)

// A figure is one number of a measured load.
type figure struct {
	name  string // name in tables
	unit  string // "" if the name already says the unit
	key   string // name for files and CSV columns
	value func(c *Config, p trial.Probe) (value float64, known bool)
	text  func(value float64) string // writes the value for people
}

// title returns the name with its unit, such as "TTFT p99 (ms)".
func (f figure) title() string {
	if f.unit == "" {
		return f.name
	}
	return f.name + " (" + f.unit + ")"
}

// A cell returns the text of one table cell for a measured load.
type cell func(c *Config, p trial.Probe) string

// people returns the figure as text for people; "" if it is not known.
func (f figure) people(c *Config, p trial.Probe) string {
	if v, known := f.value(c, p); known {
		return f.text(v)
	}
	return ""
}

// programs returns the figure as text for CSV files; "" if it is not known.
func (f figure) programs(c *Config, p trial.Probe) string {
	v, known := f.value(c, p)
	switch {
	case !known:
		return ""
	case v == float64(int64(v)):
		return strconv.FormatInt(int64(v), 10)
	}
	return loadtest.Fixed(v)
}

// latency returns a figure: a percentile of a latency in milliseconds. Its value is not known if no request was
// completed.
func latency(metric slo.Metric, percentile int) figure {
	return figure{
		fmt.Sprintf("%s p%d", strings.ToUpper(string(metric)), percentile), "ms", fmt.Sprintf("%s_p%d_ms", metric, percentile),
		func(_ *Config, p trial.Probe) (float64, bool) {
			return loadtest.Latency(p.Measurement, metric, percentile)
		}, render.Milliseconds,
	}
}

// number returns a figure with the given number of decimals. Its value is always known.
func number(name, key string, digits int, of func(bench.Measurement) float64) figure {
	return figure{name, "", key, func(_ *Config, p trial.Probe) (float64, bool) { return of(p.Measurement), true }, fixed(digits)}
}

// fixed returns a function that formats a number with the given number of decimals.
func fixed(digits int) func(float64) string {
	return func(v float64) string { return strconv.FormatFloat(v, 'f', digits, 64) }
}

func outputOf(m bench.Measurement) float64 { return m.OutputThroughput }

var (
	outputTokens  = number("Output tok/s", "output_tok_s", 0, outputOf)
	maxConcurrent = number("Max Concurrent", "max_concurrent", 0, func(m bench.Measurement) float64 { return float64(m.PeakInFlight) })
	kvCache       = figure{"KV cache", "GiB", "kv_cache_gib", func(c *Config, _ trial.Probe) (float64, bool) {
		gib := c.Result.Facts.KVCacheGiB
		return gib, gib > 0
	}, fixed(2)}
)

// gridFigures each get their own table, with a line for each rate and a column for each config, as in sweeps made by
// hand.
var gridFigures = []figure{latency(slo.TTFT, 99), latency(slo.TPOT, 99), outputTokens, maxConcurrent}

// detailFigures are the rows of the table that shows all configs at one rate.
var detailFigures = []figure{
	latency(slo.TTFT, 50), latency(slo.TTFT, 95), latency(slo.TTFT, 99),
	latency(slo.TPOT, 50), latency(slo.TPOT, 95), latency(slo.TPOT, 99),
	latency(slo.ITL, 50), latency(slo.ITL, 99),
	maxConcurrent,
	outputTokens,
	number("Completed", "completed", 0, func(m bench.Measurement) float64 { return float64(m.Completed) }),
	number("Failed", "failed", 0, func(m bench.Measurement) float64 { return float64(m.Failed) }),
	kvCache,
}

// loopFigures are the columns of the table for a closed loop.
var loopFigures = []figure{
	number("req/s", "req_s", 1, func(m bench.Measurement) float64 { return m.RequestThroughput }),
	number("tok/s", "out_tok_s", 0, outputOf),
	latency(slo.TTFT, 50), latency(slo.TTFT, 95), latency(slo.ITL, 50), latency(slo.ITL, 95), latency(slo.E2E, 50), latency(slo.E2E, 95),
}

// verdictCell returns a verdict for a table, such as PASS, or FAIL (TTFT+TPOT) if both limits were broken.
func verdictCell(_ *Config, p trial.Probe) string {
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

// A grid is a table. Its first line has the names of the columns, and each line begins with the name of the row. A cell
// is empty if the load was not measured.
type grid [][]string

// A column describes one column of a table that has a line for each load.
type column struct {
	head   string
	config *Config
	cell   cell
}

func (c *Config) cellAt(level trial.Level, shown cell) string {
	if p, ok := c.at(level); ok {
		return shown(c, p)
	}
	return ""
}

// overLoads returns a table with a line for each load.
func (l loads) overLoads(corner string, columns []column) grid {
	head := []string{corner}
	for _, c := range columns {
		head = append(head, c.head)
	}
	lines := grid{head}
	for _, level := range l {
		line := []string{l.loadWord(level.Load())}
		for _, c := range columns {
			line = append(line, c.config.cellAt(level, c.cell))
		}
		lines = append(lines, line)
	}
	return lines
}

func (s Report) byConfig(corner string, shown cell) grid {
	var columns []column
	for _, c := range s.Configs {
		columns = append(columns, column{c.Name, c, shown})
	}
	return s.overLoads(corner, columns)
}

// loopTable returns the figures of one config as text for people, with a line for each concurrency. The title of the table
// says the unit of the latencies.
func (l loads) loopTable(c *Config) grid {
	var columns []column
	for _, f := range loopFigures {
		columns = append(columns, column{f.name, c, f.people})
	}
	return l.overLoads("conc", append(columns, column{"SLO", c, verdictCell}))
}

// loopRecords returns the figures of one config for a CSV file, with a line for each measured concurrency.
func (l loads) loopRecords(c *Config) grid {
	var columns []column
	for _, f := range loopFigures {
		columns = append(columns, column{f.key, c, f.programs})
	}
	lines := l.overLoads("concurrency", columns)
	return slices.DeleteFunc(lines, func(line []string) bool { return strings.Join(line[1:], "") == "" })
}

// detail returns a table for one level. It has a line for each figure and a column for each config. The function
// cellText is figure.people or figure.programs.
func (all Configs) detail(corner string, level trial.Level, cellText func(figure, *Config, trial.Probe) string) grid {
	lines := grid{{corner}}
	for _, c := range all {
		lines[0] = append(lines[0], c.Name)
	}
	for _, f := range detailFigures {
		line := []string{f.title()}
		for _, c := range all {
			line = append(line, c.cellAt(level, func(c *Config, p trial.Probe) string { return cellText(f, c, p) }))
		}
		lines = append(lines, line)
	}
	return lines
}

// table returns the grid as a table for a terminal. Columns of numbers are aligned on the right. The first column is
// one of them if it has a head, because it then holds loads.
func (t grid) table() render.Table {
	table := render.Table{Folds: true, Rows: t[1:]}
	for i, head := range t[0] {
		table.Columns = append(table.Columns, render.Column{Head: head, Right: i > 0 || head != ""})
	}
	for _, line := range table.Rows {
		for i := range line {
			line[i] = cmp.Or(line[i], "-")
		}
	}
	return table
}
