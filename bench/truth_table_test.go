package bench_test

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// The command `make bench-accuracy` sets these environment variables. Without BENCH_ACCURACY the test of the table is
// skipped.
const (
	accuracyVariable = "BENCH_ACCURACY" // file for the table
	repeatsVariable  = "BENCH_REPEATS"  // runs of each row; 3 if unset
	rowsVariable     = "BENCH_ROWS"     // regular expression for the names of rows; all if unset
)

// The limits of the table: the p99 error of TTFT in milliseconds, the p99 send lag in milliseconds, the relative error
// of p99 TPOT, and the client's CPU time per token in microseconds.
const (
	errorBar   = 5.0
	sendLagBar = 10.0
	tpotBar    = 0.01
	cpuBar     = 8.0
)

func allRows() []row {
	var rows []row
	for _, open := range []bool{false, true} {
		for _, streams := range []int{64, 256, 1024} {
			for _, tokens := range []int{64, 256} {
				for _, tpot := range []time.Duration{20 * time.Millisecond, 50 * time.Millisecond} {
					rows = append(rows, row{streams: streams, tokens: tokens, tpot: tpot, open: open})
				}
			}
		}
		rows = append(rows, row{streams: 1024, tokens: 256, tpot: 20 * time.Millisecond, open: open, step: true})
	}
	return rows
}

// requests returns the number of counted requests of a row. There are at least two for each stream, 256 for a p99, and
// enough for six seconds.
func (r row) requests() int {
	const minRequests, minTime = 256, 6 * time.Second
	waves := max(2, (minRequests+r.streams-1)/r.streams, int(math.Ceil(float64(minTime)/float64(r.answer()))))
	return waves * r.streams
}

// A contestant is one of the clients that the table compares.
type contestant struct {
	name string
	run  func(ctx context.Context, t *testing.T, r row) figures
}

// TestAccuracyTable compares this package's client, and vLLM's if it is installed, with the truth server (package
// bench/truth). For each row it runs the clients alternately. Then it writes the table.
func TestAccuracyTable(t *testing.T) {
	file := os.Getenv(accuracyVariable)
	if file == "" {
		t.Skip("the whole table takes an hour and a quiet machine: make bench-accuracy")
	}
	repeats := 3
	if text := os.Getenv(repeatsVariable); text != "" {
		var err error
		if repeats, err = strconv.Atoi(text); err != nil || repeats < 1 {
			t.Fatalf("%s=%s: want a number of repeats of at least 1", repeatsVariable, text)
		}
	}
	chosen, err := regexp.Compile(os.Getenv(rowsVariable))
	if err != nil {
		t.Fatalf("%s: %v", rowsVariable, err)
	}
	ours := contestant{"tuner bench", func(ctx context.Context, t *testing.T, r row) figures { return r.runOurs(ctx, t, r.requests()) }}
	contestants := append([]contestant{ours}, installedVLLMs(t)...)
	table := newTable(contestants, repeats)
	for _, r := range allRows() {
		if !chosen.MatchString(r.String()) {
			continue
		}
		results := make([][]figures, len(contestants))
		for range repeats {
			for i, c := range contestants {
				results[i] = append(results[i], c.run(t.Context(), t, r))
			}
		}
		for i, c := range contestants {
			m := median(results[i])
			missed := m.missed(r, c.name == ours.name)
			table.add(t, r, c.name, m, missed)
			if c.name == ours.name && m.Failed+m.Unpaired > 0 {
				t.Errorf("%s: %d requests failed and %d have no pair, want none", r, m.Failed, m.Unpaired)
			}
		}
	}
	table.end()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(table.markdown()), 0o644); err != nil {
		t.Fatal(err)
	}
}

// median returns the run with the median p99 error of TTFT, so that all figures of a line come from one run.
func median(runs []figures) figures {
	runs = slices.SortedFunc(slices.Values(runs), func(a, b figures) int { return cmp.Compare(a.Error.P99, b.Error.P99) })
	return runs[len(runs)/2]
}

// missed names the limits that a run broke, and whether the machine was too slow for the server.
func (f figures) missed(r row, ours bool) string {
	var why []string
	note := func(is bool, format string, args ...any) {
		if is {
			why = append(why, fmt.Sprintf(format, args...))
		}
	}
	note(f.Failed > 0, "%d failed", f.Failed)
	note(f.Unpaired > 0, "%d without truth", f.Unpaired)
	note(!r.step && f.Late.P99 > errorBar, "server late (p99 %.1f ms)", f.Late.P99)
	note(f.Error.P99 > errorBar, "error > %g ms", errorBar)
	note(!within(f.TPOT.P99, f.TrueTPOT.P99, tpotBar), "TPOT > %g %%", 100*tpotBar)
	if ours {
		note(r.open && f.SendLag.P99 > sendLagBar, "client-limited (send lag)")
		note(f.CPU > cpuBar, "CPU > %g", cpuBar)
	}
	if len(why) == 0 {
		return "keeps all"
	}
	return strings.Join(why, "; ")
}

// columns are the heads of the table's columns. The function cells returns the texts of one line below these heads.
var columns = []string{
	"loop", "streams", "tokens", "ms", "client", "true TTFT p99", "told", "error p50", "error p99", "send lag p99",
	"true TPOT p50", "told", "true TPOT p99", "told", "true ITL p99", "told", "CPU-s/M tok", "RSS MiB", "server late p99", "server CPU-s/M", "verdict",
}

func cells(r row, client string, f figures, verdict string) []string {
	lag := "–"
	if f.SendLag.N > 0 {
		lag = fmt.Sprintf("%.2f", f.SendLag.P99)
	}
	line := []string{r.loop(), strconv.Itoa(r.streams), strconv.Itoa(r.tokens), strconv.Itoa(int(r.tpot.Milliseconds())), client}
	for _, v := range []float64{f.TrueTTFT.P99, f.TTFT.P99, f.Error.P50, f.Error.P99} {
		line = append(line, fmt.Sprintf("%.2f", v))
	}
	line = append(line, lag)
	for _, v := range []float64{f.TrueTPOT.P50, f.TPOT.P50, f.TrueTPOT.P99, f.TPOT.P99} {
		line = append(line, fmt.Sprintf("%.3f", v))
	}
	for _, v := range []float64{f.TrueITL.P99, f.ITL.P99, f.CPU, f.Memory, f.Late.P99, f.ServerCPU} {
		line = append(line, fmt.Sprintf("%.1f", v))
	}
	return append(line, verdict)
}

// A table collects the lines that are printed and written to the file.
type table struct {
	intro string
	lines [][]string
	began busyTime
}

func newTable(contestants []contestant, repeats int) *table {
	var names []string
	for _, c := range contestants {
		names = append(names, c.name)
	}
	return &table{began: busyNow(), intro: fmt.Sprintf("Commit %s, %s, %s. %s, interleaved, repeats of each: %d. The table has the run with the middle p99 error.",
		commit(), time.Now().Format(time.DateOnly), machine(), strings.Join(names, ", "), repeats)}
}

// add adds a line and logs its verdict.
func (b *table) add(t *testing.T, r row, client string, f figures, verdict string) {
	b.lines = append(b.lines, cells(r, client, f, verdict))
	t.Logf("%s, %s: error p99 %.2f ms, %s", client, r, f.Error.P99, verdict)
}

// end adds a sentence that says how busy the machine was, and prints the table.
func (b *table) end() {
	b.intro += fmt.Sprintf(" The machine was busy for %.0f %% of the time, the server and the clients included.", 100*busyNow().since(b.began))
	out := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, line := range append([][]string{columns}, b.lines...) {
		fmt.Fprintln(out, strings.Join(line, "\t")+"\t")
	}
	_ = out.Flush() // to the terminal
}

// explanation is the introduction of the table's page.
const explanation = `# The client against a server that knows the truth

Read here how far the latencies that tuner bench reports may be from the true ones, and what the client costs in CPU time.
vllm bench serve is measured beside it.

Written by ` + "`make bench-accuracy`" + `. The server (bench/truth) is a separate process on the same machine. It records when the
kernel received the last byte of each request, and when it began to write each token. The first token is due after 20 ms, and
the others at the interval in the fourth column. Latencies are in ms; "told" is the client's report.

- error: by request, reported TTFT less true TTFT, less the client's own send lag if it reports that (vLLM's does not).
- send lag: from the due time of a request to its sending.
- CPU: the client's CPU time per million tokens without start-up. Ours counts from before the first connection to the end of the
  run, vLLM's from the first request to the last token.
- server late: how late the server wrote its tokens. If it is large, the machine was too slow for the load, whatever the client did.
- in step: the tokens of all streams are due together, as in an engine, so the last token of each step is late.
- verdict: error p99 ≤ 5 and p99 TPOT within 1 %; for our client also send lag p99 ≤ 10 in the open loop and CPU ≤ 8.

`

func (b *table) markdown() string {
	var text strings.Builder
	text.WriteString(explanation + b.intro + "\n\n| " + strings.Join(columns, " | ") + " |\n|" + strings.Repeat("---|", len(columns)) + "\n")
	for _, line := range b.lines {
		text.WriteString("| " + strings.Join(line, " | ") + " |\n")
	}
	return text.String()
}

// A busyTime is the busy time and the total time of all cores since boot, in ticks.
type busyTime struct{ busy, all float64 }

func busyNow() busyTime {
	var b busyTime
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return b
	}
	line, _, _ := strings.Cut(string(text), "\n")
	fields := strings.Fields(line)
	for i, word := range fields[1:min(9, len(fields))] { // the guest times after these fields are part of user time already
		ticks, _ := strconv.ParseFloat(word, 64)
		b.all += ticks
		if i != 3 && i != 4 { // idle and iowait
			b.busy += ticks
		}
	}
	return b
}

// since returns the share of time for which the cores were busy between an earlier reading and the reading b.
func (b busyTime) since(earlier busyTime) float64 {
	return (b.busy - earlier.busy) / max(1, b.all-earlier.all)
}
