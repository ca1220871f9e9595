package loadtest

import (
	"encoding/csv"
	"strconv"

	"vllmtuner/bench"
)

// A Column is a column of the CSV table.
type Column struct {
	Name  string
	Value func(Result) string
}

// Fixed writes a figure with three digits behind the point: a latency in milliseconds keeps its microseconds.
func Fixed(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) }

// Columns returns the columns of the CSV table. They begin as in the tables of manual sweeps: concurrency,req_s,out_tok_s,…
func Columns(closed bool) []Column {
	first := Column{"rate", func(r Result) string { return strconv.FormatFloat(r.rate, 'f', -1, 64) }}
	if closed {
		first = Column{"concurrency", func(r Result) string { return strconv.Itoa(r.concurrency) }}
	}
	columns := []Column{
		first,
		{"req_s", func(r Result) string { return Fixed(r.Measurement.RequestThroughput) }},
		{"out_tok_s", func(r Result) string { return Fixed(r.Measurement.OutputThroughput) }},
	}
	for _, l := range []struct {
		name  string
		stats func(bench.Measurement) bench.Stats
	}{
		{"ttft", func(m bench.Measurement) bench.Stats { return m.TTFT }},
		{"itl", func(m bench.Measurement) bench.Stats { return m.ITL }},
		{"e2e", func(m bench.Measurement) bench.Stats { return m.E2E }},
	} {
		columns = append(columns,
			Column{l.name + "_p50_ms", func(r Result) string { return msOf(l.stats(r.Measurement), P50) }},
			Column{l.name + "_p95_ms", func(r Result) string { return msOf(l.stats(r.Measurement), P95) }})
	}
	return append(columns,
		Column{"ttft_p99_ms", func(r Result) string { return msOf(r.judged("p99 TTFT", r.Measurement.TTFT), P99) }},
		Column{"tpot_p50_ms", func(r Result) string { return msOf(r.Measurement.TPOT, P50) }},
		Column{"tpot_p99_ms", func(r Result) string { return msOf(r.judged("p99 TPOT", r.Measurement.TPOT), P99) }},
		Column{"completed", func(r Result) string { return strconv.Itoa(r.Measurement.Completed) }},
		Column{"failed", func(r Result) string { return strconv.Itoa(r.Measurement.Failed) }},
		Column{"slo", VerdictWord},
		Column{"client_limited", func(r Result) string { return r.Limited }})
}

// msOf returns a figure of a latency, or "" when no latency was measured.
func msOf(s bench.Stats, of func(bench.Stats) float64) string {
	if s.N == 0 {
		return ""
	}
	return Fixed(of(s))
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
	columns := Columns(r.concurrency > 0)
	names, values := make([]string, len(columns)), make([]string, len(columns))
	for i, c := range columns {
		names[i], values[i] = c.Name, c.Value(r)
	}
	out := csv.NewWriter(o.Out)
	if o.rows == 1 {
		if err := out.Write(names); err != nil {
			return err
		}
	}
	if err := out.Write(values); err != nil {
		return err
	}
	out.Flush()
	return out.Error()
}
