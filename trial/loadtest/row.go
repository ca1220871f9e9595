package loadtest

import (
	"fmt"

	"vllmtuner/bench"
	"vllmtuner/render"
)

// writeRow writes one run as a line of a table. The first run gets the heads above its line.
func (o *Report) writeRow(r Result) error {
	var t render.Text
	high, name := "p99", "rate"
	if r.concurrency > 0 {
		high, name = "p95", "conc"
	}
	if o.rows == 1 {
		fmt.Fprintf(&t, "%7s %7s %7s %13s %13s %14s %6s %s\n", "", "", "", "TTFT ms", middle(r), "E2E ms", "", "")
		fmt.Fprintf(&t, "%7s %7s %7s %6s %6s %6s %6s %7s %6s %6s %s\n", name, "req/s", "tok/s", "p50", high, "p50", high, "p50", high, "failed", "SLO")
	}
	m := r.Measurement
	offered, first, second := fmt.Sprintf("%.4g", r.rate), r.judged("p99 TTFT", m.TTFT), r.judged("p99 TPOT", m.TPOT)
	tail := P99
	if r.concurrency > 0 {
		offered, second, tail = fmt.Sprint(r.concurrency), m.ITL, P95
	}
	fmt.Fprintf(&t, "%7s %7.2f %7.0f %6s %6s %6s %6s %7s %6s %6d %s\n", offered, m.RequestThroughput, m.OutputThroughput,
		cell(first, P50), cell(first, tail), cell(second, P50), cell(second, tail), cell(m.E2E, P50), cell(m.E2E, tail), m.Failed, VerdictWord(r))
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

// P50 is the median of a latency in milliseconds.
func P50(s bench.Stats) float64 { return s.P50 }

// P95 is the 95th percentile of a latency in milliseconds.
func P95(s bench.Stats) float64 { return s.P95 }

// P99 is the 99th percentile of a latency in milliseconds.
func P99(s bench.Stats) float64 { return s.P99 }

// cell is a figure of a latency, and "-" where none was measured.
func cell(s bench.Stats, of func(bench.Stats) float64) string {
	if s.N == 0 {
		return "-"
	}
	return render.Milliseconds(of(s))
}

// middle heads the second latency of a table. Sweeps over concurrency show ITL there.
func middle(r Result) string {
	if r.concurrency > 0 {
		return "ITL ms"
	}
	return "TPOT ms"
}
