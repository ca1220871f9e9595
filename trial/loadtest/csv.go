package loadtest

import (
	"encoding/csv"
	"fmt"
	"strconv"

	"vllmtuner/bench"
	"vllmtuner/trial/slo"
)

// Fixed writes a figure with three digits behind the point: a latency in milliseconds keeps its microseconds.
func Fixed(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) }

// Latency returns the 50th, 95th or 99th percentile of a latency in milliseconds. known is false if no latency was measured.
func Latency(m bench.Measurement, metric slo.Metric, percentile int) (ms float64, known bool) {
	s := map[slo.Metric]bench.Stats{slo.TTFT: m.TTFT, slo.TPOT: m.TPOT, slo.ITL: m.ITL, slo.E2E: m.E2E}[metric]
	return map[int]float64{50: s.P50, 95: s.P95, 99: s.P99}[percentile], s.N > 0
}

// latency is Latency with p99 TTFT and p99 TPOT as the verdict used them. In a run that ended early the verdict counts requests that
// still waited, while the measurement has completed ones alone.
func (r Result) latency(metric slo.Metric, percentile int) (ms float64, known bool) {
	limit := slo.Limit{Metric: metric, Percentile: float64(percentile)}.String()
	if r.stopped && r.Verdict != nil && (limit == "p99 TTFT" || limit == "p99 TPOT") {
		for _, c := range r.Verdict.Checks {
			if c.Limit == limit && c.ValueMS > 0 {
				return c.ValueMS, true
			}
		}
	}
	return Latency(r.Measurement, metric, percentile)
}

// Record returns the line of a run in the CSV table, and the names of its columns. They begin as in the tables of manual sweeps:
// concurrency,req_s,out_tok_s,…
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
	add("slo", VerdictWord(r))
	add("client_limited", r.Limited)
	return names, values
}

// VerdictWord is the verdict on a run in one word; "" without an SLO.
func VerdictWord(r Result) string {
	switch {
	case r.Measurement.Void != "":
		return "void"
	case r.Verdict == nil:
		return ""
	case r.Limited != "":
		return "client-limited"
	case r.Verdict.Pass:
		return "passed"
	}
	return "failed"
}

func (o *Report) writeCSV(r Result) error {
	names, values := Record(r)
	lines := [][]string{names, values}
	if o.rows > 1 {
		lines = lines[1:]
	}
	return csv.NewWriter(o.Out).WriteAll(lines)
}
