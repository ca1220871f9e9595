package loadtest

import (
	"fmt"
	"strconv"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial/slo"
)

// writeRow writes one run as a line of a table. The first run gets the heads above its line.
func (o *Report) writeRow(r Result) error {
	var t render.Text
	m, name, offered := r.Measurement, "rate", fmt.Sprintf("%.4g", r.Rate)
	second, high := slo.TPOT, 99 // the middle latency, and the percentile beside the median
	if r.Streams > 0 {
		name, offered, second, high = "conc", strconv.Itoa(r.Streams), slo.ITL, 95
	}
	if o.rows == 1 {
		middle, tail := strings.ToUpper(string(second))+" ms", fmt.Sprintf("p%d", high)
		fmt.Fprintf(&t, "%7s %7s %7s %13s %13s %14s %6s %s\n", "", "", "", "TTFT ms", middle, "E2E ms", "", "")
		fmt.Fprintf(&t, "%7s %7s %7s %6s %6s %6s %6s %7s %6s %6s %s\n", name, "req/s", "tok/s", "p50", tail, "p50", tail, "p50", tail, "failed", "SLO")
	}
	at := func(metric slo.Metric, percentile int) string { return cell(r.latency(metric, percentile)) }
	fmt.Fprintf(&t, "%7s %7.2f %7.0f %6s %6s %6s %6s %7s %6s %6d %s\n", offered, m.RequestThroughput, m.OutputThroughput,
		at(slo.TTFT, 50), at(slo.TTFT, high), at(second, 50), at(second, high), at(slo.E2E, 50), at(slo.E2E, high), m.Failed, VerdictWord(r))
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
