package loadtest

import (
	"encoding/csv"
	"fmt"
	"math"
	"strconv"
	"strings"

	"vllmtuner/bench"
	"vllmtuner/render"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// writeRow writes one run as a line of a table. Above the first line it writes the column heads.
func (o *Report) writeRow(r Result) error {
	t := render.Text{Width: render.Columns(o.Out)}
	m, name, offered := r.Measurement, "rate", render.Rate(r.Rate)
	second, high := slo.TPOT, 99 // the latency in the middle columns, and the percentile shown beside the median
	if r.Streams > 0 {
		name, offered, second, high = "conc", strconv.Itoa(r.Streams), slo.ITL, 95
	}
	table := render.Table{Gap: 1}
	add := func(group, head string, least int, cell string) {
		table.Add(render.Column{Group: group, Head: head, MinWidth: least, Right: true}, []string{cell})
	}
	add("", name, 7, offered)
	add("", "req/s", 7, fmt.Sprintf("%.2f", m.RequestThroughput))
	add("", "tok/s", 7, fmt.Sprintf("%.0f", m.OutputThroughput))
	for _, metric := range []slo.Metric{slo.TTFT, second, slo.E2E} {
		for _, percentile := range []int{50, high} {
			add(strings.ToUpper(string(metric))+" ms", fmt.Sprintf("p%d", percentile), 6, cell(r.latency(metric, percentile)))
		}
	}
	add("", "failed", 6, strconv.Itoa(m.Failed))
	table.Add(render.Column{Head: "SLO"}, []string{verdictWord(r)})
	lines := table.Lines(t.Columns())
	if o.rows > 1 {
		lines = lines[len(lines)-1:] // the heads stand above the first row
	}
	t.WriteString(strings.Join(lines, "\n") + "\n")
	if r.Limited != "" {
		t.Paragraph("        client-limited: "+r.Limited, "        ")
	}
	if r.Verdict != nil && !r.Verdict.Pass {
		t.Paragraph("        "+r.Verdict.Reason, "        ")
	}
	if m.Failed > 0 {
		t.Paragraph("        failed: "+failuresText(m), "        ")
	}
	for _, note := range r.notes {
		t.Paragraph("        "+note, "        ")
	}
	return t.Flush(o.Out)
}

// cell returns a latency as people read it, or "-" when none was measured.
func cell(ms float64, known bool) string {
	if !known {
		return "-"
	}
	return render.Milliseconds(ms)
}

// Fixed writes a figure with three digits after the decimal point, so that a latency in milliseconds keeps its
// microseconds.
func Fixed(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) }

// Latency returns the 50th, 95th or 99th percentile of a latency in milliseconds. If no latency was measured, known is
// false.
func Latency(m bench.Measurement, metric slo.Metric, percentile int) (ms float64, known bool) {
	s := map[slo.Metric]bench.Stats{slo.TTFT: m.TTFT, slo.TPOT: m.TPOT, slo.ITL: m.ITL, slo.E2E: m.E2E}[metric]
	return map[int]float64{50: s.P50, 95: s.P95, 99: s.P99}[percentile], s.N > 0
}

// latency returns the same as Latency, except for the p99 TTFT and p99 TPOT of a run that ended early. These come from
// the verdict, which counts the requests that still waited. The measurement has only the completed requests.
func (r Result) latency(metric slo.Metric, percentile int) (ms float64, known bool) {
	if r.stopped && r.Verdict != nil && percentile == 99 && (metric == slo.TTFT || metric == slo.TPOT) {
		limit := slo.Limit{Metric: metric, Percentile: 99}.String()
		for _, c := range r.Verdict.Checks {
			if c.Limit == limit && c.ValueMS > 0 {
				return c.ValueMS, true
			}
		}
	}
	return Latency(r.Measurement, metric, percentile)
}

// Record returns the line of a run in the CSV table, and the names of its columns. The columns begin as in the tables
// of manual sweeps: concurrency,req_s,out_tok_s,…
func Record(r Result) (names, values []string) {
	add := func(name, value string) { names, values = append(names, name), append(values, value) }
	latencies := func(metric slo.Metric, percentiles ...int) {
		for _, p := range percentiles {
			text := ""
			if ms, known := r.latency(metric, p); known {
				text = Fixed(ms)
			}
			add(fmt.Sprintf("%s_p%d_ms", metric, p), text)
		}
	}
	if r.Streams > 0 {
		add("concurrency", strconv.Itoa(r.Streams))
	} else {
		add("rate", strconv.FormatFloat(r.Rate, 'f', -1, 64))
	}
	add("req_s", Fixed(r.Measurement.RequestThroughput))
	add("out_tok_s", Fixed(r.Measurement.OutputThroughput))
	latencies(slo.TTFT, 50, 95)
	latencies(slo.ITL, 50, 95)
	latencies(slo.E2E, 50, 95)
	latencies(slo.TTFT, 99)
	latencies(slo.TPOT, 50, 99)
	add("completed", strconv.Itoa(r.Measurement.Completed))
	add("failed", strconv.Itoa(r.Measurement.Failed))
	add("slo", verdictWord(r))
	add("client_limited", r.Limited)
	return names, values
}

// verdictWord returns the verdict on a run in one word, such as "passed"; "" without an SLO.
func verdictWord(r Result) string {
	switch {
	case r.Measurement.Void != "":
		return "void"
	case r.Verdict == nil:
		return ""
	}
	return r.Verdict.Word()
}

func (o *Report) writeCSV(r Result) error {
	names, values := Record(r)
	lines := [][]string{names, values}
	if o.rows > 1 {
		lines = lines[1:]
	}
	return csv.NewWriter(o.Out).WriteAll(lines)
}

// HighestText names the highest load of a grid that kept the SLO, and lower loads that broke it.
func HighestText(steps []capacity.Step, closed bool) string {
	h, below := capacity.Highest(steps)
	switch {
	case h.Limited != "" && !h.Met():
		return "no load is known to be within the SLO: " + h.Why
	case h.Bound == "":
		return h.Why
	case !h.Met():
		return "no load within the SLO: " + h.Why
	}
	text := fmt.Sprintf("%s is the highest within the SLO; %s", LoadText(h.Rate, closed), h.Why)
	if h.Limited != "" {
		text = fmt.Sprintf("%s is within the SLO, and may not be the highest: %s", LoadText(h.Rate, closed), h.Why)
	}
	for _, load := range below {
		text += fmt.Sprintf("; but %s failed", LoadText(load, closed))
	}
	return text
}

// LoadText writes a load with its unit: a concurrency in a closed loop, and otherwise a rate. The text stands beside
// the sentences of capacity.Highest, so it has as many digits as they have.
func LoadText(load float64, closed bool) string {
	if closed {
		return fmt.Sprintf("concurrency %g", load)
	}
	return render.Rate(load) + " req/s"
}

// RateText writes a rate for a table, with at least two digits after the decimal point, such as 0.50 or 0.125.
func RateText(rate float64) string {
	if cents := 100 * rate; math.Abs(cents-math.Round(cents)) > 1e-9*cents {
		return strconv.FormatFloat(rate, 'f', -1, 64)
	}
	return strconv.FormatFloat(rate, 'f', 2, 64)
}
