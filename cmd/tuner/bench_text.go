package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/render"
)

// A textLines collects lines, so that one write puts them out.
type textLines struct{ strings.Builder }

func (t *textLines) row(name, format string, v any) {
	fmt.Fprintf(t, "%-40s "+format+"\n", name, v)
}

func (t *textLines) title(text string, rule string) {
	const width = 50 // of vllm bench serve's own block
	if text != "" {
		text = " " + text + " "
	}
	left := (width - len(text)) / 2
	t.WriteString(strings.Repeat(rule, left) + text + strings.Repeat(rule, width-left-len(text)) + "\n")
}

// writeBlock writes one run under the words of vllm bench serve (0.14.1 and 0.33), with what it does not say beside them.
func writeBlock(w io.Writer, r benchResult) error {
	var t textLines
	m := r.m
	if r.limited != "" {
		t.WriteString(wrapped("CLIENT-LIMITED: "+r.limited+"; the figures below are not the server's alone", ""))
		t.WriteString("\n")
	}
	if m.Void != "" {
		t.WriteString(wrapped("VOID: "+m.Void, ""))
		t.WriteString("\n")
	}
	t.title("Serving Benchmark Result", "=")
	t.WriteString(wrapped("Workload: "+r.asked, "  "))
	t.counts(r)
	t.row("Request throughput (req/s):", "%.2f", m.RequestThroughput)
	if m.Good > 0 || len(m.Over) > 0 {
		t.row("Request goodput (req/s):", "%.2f", m.Goodput)
	}
	t.row("Output token throughput (tok/s):", "%.2f", m.OutputThroughput)
	t.row("Peak output token throughput (tok/s):", "%.2f", float64(m.PeakChunks))
	t.row("Peak concurrent requests:", "%.2f", float64(m.PeakInFlight))
	t.row("Total token throughput (tok/s):", "%.2f", m.TotalThroughput)
	t.row("Mean requests in flight:", "%.2f", m.MeanInFlight)
	if m.Sessions.Turns > 0 {
		t.row("Completed sessions:", "%d", m.Sessions.Completed)
		t.row("Session throughput (sessions/s):", "%.3f", m.Sessions.PerSecond)
	}
	for _, s := range []struct {
		title, name string
		stats       bench.Stats
	}{
		{"Time to First Token", "TTFT", m.TTFT},
		{"Time per Output Token (excl. 1st token)", "TPOT", m.TPOT},
		{"Inter-token Latency", "ITL", m.ITL},
		{"End-to-end Latency", "E2EL", m.E2E},
	} {
		t.title(s.title, "-")
		if s.stats.N == 0 {
			t.row(s.name+":", "%s", "none measured")
			continue
		}
		t.row("Mean "+s.name+" (ms):", "%.2f", s.stats.Mean)
		t.row("Median "+s.name+" (ms):", "%.2f", s.stats.P50)
		t.row("P90 "+s.name+" (ms):", "%.2f", s.stats.P90)
		t.row("P95 "+s.name+" (ms):", "%.2f", s.stats.P95)
		t.row("P99 "+s.name+" (ms):", "%.2f", s.stats.P99)
		t.row("P99.9 "+s.name+" (ms):", "%.2f", s.stats.P999)
	}
	t.client(m)
	t.title("", "=")
	t.verdict(r)
	_, err := io.WriteString(w, t.String())
	return err
}

// counts says what was offered, and what became of it.
func (t *textLines) counts(r benchResult) {
	m := r.m
	t.row("Successful requests:", "%d", m.Completed)
	t.row("Failed requests:", "%d", m.Failed)
	for _, kind := range slices.Sorted(maps.Keys(m.Failures)) {
		t.row("  "+string(kind)+":", "%d", m.Failures[kind])
	}
	switch {
	case r.concurrency > 0:
		t.row("Maximum request concurrency:", "%d", r.concurrency)
	case r.rate > 0 && m.Sessions.Turns > 0:
		t.row("Session rate configured (sessions/s):", "%.2f", r.rate)
	case r.rate > 0:
		t.row("Request rate configured (RPS):", "%.2f", r.rate)
		if m.Window > 0 {
			t.row("Request rate of these draws (RPS):", "%.2f", float64(m.Requests)/m.Window.Seconds())
		}
	default:
		t.row("Request rate configured:", "%s", r.shot)
	}
	t.row("Window (s):", "%.2f", m.Window.Seconds())
	t.row("Benchmark duration (s):", "%.2f", m.Duration.Seconds())
	t.row("Total input tokens:", "%d", m.PromptTokens)
	t.row("Total generated tokens:", "%d", m.OutputTokens)
}

// client is what the load generator itself may have added, and what it cost.
func (t *textLines) client(m bench.Measurement) {
	l := m.Lateness
	t.title("Client", "-")
	t.row("P99 send lag (ms):", "%.2f", m.SendLag.P99)
	t.row("P99 read lag (ms):", "%.2f", m.ReadLag.P99)
	t.row("Longest GC pause (ms):", "%.2f", milliseconds(l.GCPause))
	t.row("P99 wait for a processor (ms):", "%.2f", milliseconds(l.SchedulerP99))
	t.row("Stopped by the CPU limit (ms):", "%.0f", milliseconds(l.Throttled))
	t.row("CPU time (s):", "%.2f", l.CPU.Seconds())
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// verdict is what the SLO and the notes say.
func (t *textLines) verdict(r benchResult) {
	if v := r.verdict; v != nil {
		for _, c := range v.Checks {
			t.WriteString(wrapped(fmt.Sprintf("%-6s %s", map[bool]string{true: "kept", false: "broken"}[c.Headroom >= 0], c), "  "))
		}
		t.WriteString(wrapped("SLO "+verdictWord(r)+": "+v.Reason, "  "))
	}
	for _, note := range r.notes {
		t.WriteString(wrapped("note: "+note, "  "))
	}
}

// failuresText counts the failures by kind in one line.
func failuresText(m bench.Measurement) string {
	var words []string
	for _, kind := range slices.Sorted(maps.Keys(m.Failures)) {
		words = append(words, fmt.Sprintf("%d %s", m.Failures[kind], kind))
	}
	return strings.Join(words, ", ")
}

// writeRow writes one run as a line of a table, below its head for the first.
func (o *benchReport) writeRow(r benchResult) error {
	var t textLines
	high, name := "p99", "rate"
	if r.concurrency > 0 {
		high, name = "p95", "conc"
	}
	if o.rows == 1 {
		fmt.Fprintf(&t, "%7s %7s %7s %13s %13s %14s %6s %s\n", "", "", "", "TTFT ms", middle(r), "E2E ms", "", "")
		fmt.Fprintf(&t, "%7s %7s %7s %6s %6s %6s %6s %7s %6s %6s %s\n", name, "req/s", "tok/s", "p50", high, "p50", high, "p50", high, "failed", "SLO")
	}
	offered, second := fmt.Sprintf("%.4g", r.rate), r.judged("p99 TPOT", r.m.TPOT)
	first := r.judged("p99 TTFT", r.m.TTFT)
	pick := func(s bench.Stats) float64 { return s.P99 }
	if r.concurrency > 0 {
		offered, second = fmt.Sprint(r.concurrency), r.m.ITL
		pick = func(s bench.Stats) float64 { return s.P95 }
	}
	fmt.Fprintf(&t, "%7s %7.2f %7.0f %6s %6s %6s %6s %7s %6s %6d %s\n", offered, r.m.RequestThroughput, r.m.OutputThroughput,
		cell(first, median), cell(first, pick), cell(second, median), cell(second, pick), cell(r.m.E2E, median), cell(r.m.E2E, pick), r.m.Failed, verdictWord(r))
	if r.limited != "" {
		t.WriteString(wrapped("        client-limited: "+r.limited, "        "))
	}
	if r.verdict != nil && !r.verdict.Pass {
		t.WriteString(wrapped("        "+r.verdict.Reason, "        "))
	}
	if r.m.Failed > 0 {
		t.WriteString(wrapped("        failed: "+failuresText(r.m), "        "))
	}
	for _, note := range r.notes {
		t.WriteString(wrapped("        "+note, "        "))
	}
	_, err := io.WriteString(o.w, t.String())
	return err
}

func median(s bench.Stats) float64 { return s.P50 }

// cell is a figure of a latency that was measured: nothing is not 0 ms.
func cell(s bench.Stats, of func(bench.Stats) float64) string {
	if s.N == 0 {
		return "-"
	}
	return short(of(s))
}

// middle is the second latency of a table: between tokens in a closed loop, as sweeps over concurrency have it.
func middle(r benchResult) string {
	if r.concurrency > 0 {
		return "ITL ms"
	}
	return "TPOT ms"
}

// short is a latency in few digits.
func short(ms float64) string {
	if ms < 100 {
		return fmt.Sprintf("%.1f", ms)
	}
	return fmt.Sprintf("%.0f", ms)
}

// wrapped breaks a text into lines of at most 80 columns; those after the first are indented.
func wrapped(text, indent string) string {
	var out strings.Builder
	line := text[:len(text)-len(strings.TrimLeft(text, " "))]
	start := true
	for word := range strings.FieldsSeq(text) {
		if !start && render.Width(line)+1+render.Width(word) > usualWidth {
			out.WriteString(line + "\n")
			line, start = indent, true
		}
		if !start {
			line += " "
		}
		line, start = line+word, false
	}
	out.WriteString(line + "\n")
	return out.String()
}
