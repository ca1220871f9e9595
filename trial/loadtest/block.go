package loadtest

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"vllmtuner/bench"
	"vllmtuner/render"
)

// A block is the text that reports one run. It is no render.Table, because programs read it. It has the names, widths
// and horizontal lines of vllm bench serve, whatever the width of the terminal.
type block struct{ render.Text }

func (t *block) row(name, format string, v any) {
	fmt.Fprintf(t, "%-40s "+format+"\n", name, v)
}

func (t *block) title(text string, rule string) {
	const width = 50 // as in the output of vllm bench serve
	if text != "" {
		text = " " + text + " "
	}
	left := (width - len(text)) / 2
	t.WriteString(strings.Repeat(rule, left) + text + strings.Repeat(rule, width-left-len(text)) + "\n")
}

// writeBlock writes one run with the row names of vllm bench serve (0.14.1 and 0.33), and adds rows of its own.
func writeBlock(w io.Writer, r Result, workload string) error {
	t := block{render.Text{Width: render.Columns(w), NameWidth: len("broken ")}}
	m := r.Measurement
	if r.Limited != "" {
		t.Paragraph("CLIENT-LIMITED: "+r.Limited+"; the figures below are not the server's alone", "")
		t.WriteString("\n")
	}
	if m.Void != "" {
		t.Paragraph("VOID: "+m.Void, "")
		t.WriteString("\n")
	}
	t.title("Serving Benchmark Result", "=")
	t.Paragraph("Workload: "+workload, "  ")
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
	return t.Flush(w)
}

// counts writes how many requests were sent and how they ended.
func (t *block) counts(r Result) {
	m := r.Measurement
	t.row("Successful requests:", "%d", m.Completed)
	t.row("Failed requests:", "%d", m.Failed)
	for _, kind := range slices.Sorted(maps.Keys(m.Failures)) {
		t.row("  "+string(kind)+":", "%d", m.Failures[kind])
	}
	switch {
	case r.Streams > 0:
		t.row("Maximum request concurrency:", "%d", r.Streams)
	case r.Rate > 0 && m.Sessions.Turns > 0:
		t.row("Session rate configured (sessions/s):", "%.2f", r.Rate)
	case r.Rate > 0:
		t.row("Request rate configured (RPS):", "%.2f", r.Rate)
		if m.Window > 0 {
			t.row("Request rate of these draws (RPS):", "%.2f", float64(m.Requests)/m.Window.Seconds())
		}
	default:
		t.row("Request rate configured:", "%s", r.Run)
	}
	t.row("Window (s):", "%.2f", m.Window.Seconds())
	t.row("Benchmark duration (s):", "%.2f", m.Duration.Seconds())
	t.row("Total input tokens:", "%d", m.PromptTokens)
	t.row("Total generated tokens:", "%d", m.OutputTokens)
}

// client writes how late the load generator was, and how much CPU time it took.
func (t *block) client(m bench.Measurement) {
	l := m.Lateness
	t.title("Client", "-")
	t.row("P99 send lag (ms):", "%.2f", m.SendLag.P99)
	t.row("P99 read lag (ms):", "%.2f", m.ReadLag.P99)
	t.row("Longest GC pause (ms):", "%.2f", render.InMilliseconds(l.GCPause))
	t.row("P99 wait for a processor (ms):", "%.2f", render.InMilliseconds(l.SchedulerP99))
	t.row("Stopped by the CPU limit (ms):", "%.0f", render.InMilliseconds(l.Throttled))
	t.row("CPU time (s):", "%.2f", l.CPU.Seconds())
}

// verdict adds the limits of the SLO, the verdict and the notes.
func (t *block) verdict(r Result) {
	if v := r.Verdict; v != nil {
		for _, c := range v.Checks {
			t.Item(map[bool]string{true: "kept", false: "broken"}[c.Headroom >= 0], "%s", c)
		}
		t.Paragraph("SLO "+verdictWord(r)+": "+v.Reason, "  ")
	}
	for _, note := range r.notes {
		t.Paragraph("note: "+note, "  ")
	}
}

func failuresText(m bench.Measurement) string {
	var words []string
	for _, kind := range slices.Sorted(maps.Keys(m.Failures)) {
		words = append(words, fmt.Sprintf("%d %s", m.Failures[kind], kind))
	}
	return strings.Join(words, ", ")
}
