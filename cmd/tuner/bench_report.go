package main

import (
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/foreign"
	"vllmtuner/studies/rights"
	"vllmtuner/trial/capacity"
)

// errNoRunKept is the outcome of runs of which none kept the SLO in time.
var errNoRunKept = errors.New("no run kept the SLO")

// moreCores says what helps where the load generator was late.
const moreCores = "run tuner where it has a core of its own at all times, beside no other work"

// A benchReport writes the runs as they end.
type benchReport struct {
	b         *benching
	w         io.Writer
	format    string
	table     bool // several runs, one line each
	rows      int
	documents int      // of YAML
	failed    []string // runs without a completed request, or that measured something else than was asked

	file   string // of the result JSON; "" when none is wanted
	append bool
	meta   benchMeta
}

// newBenchReport reads the flags of the report.
func newBenchReport(c *cli.Context, b *benching) (*benchReport, error) {
	o := &benchReport{b: b, w: c.App.Writer, format: c.String("output"), table: len(b.shots) > 1 || b.search != nil, file: c.String("result-file"), append: c.Bool("append")}
	formats := []string{"text", "csv", "json", "yaml"}
	if !slices.Contains(formats, o.format) {
		return nil, usage("--output %s: allowed are %s", o.format, strings.Join(formats, ", "))
	}
	printDocuments(c, o.format)
	o.w = c.App.Writer
	if o.append && o.file == "" {
		return nil, usage("--append needs --result-file")
	}
	var err error
	o.meta, err = newBenchMeta(c, b)
	return o, err
}

// begin finds out before the first run whether the result file can be written.
func (o *benchReport) begin() error {
	if o.file == "" {
		return nil
	}
	return o.openFile(func(*os.File) error { return nil })
}

// openFile opens the result file for one write, and empties it at the first unless it is added to.
func (o *benchReport) openFile(write func(*os.File) error) error {
	how := os.O_CREATE | os.O_WRONLY | os.O_APPEND
	if !o.append {
		how |= os.O_TRUNC
	}
	f, err := os.OpenFile(o.file, how, rights.File(filepath.Dir(o.file)))
	if err != nil {
		return usage("--result-file: %w", err)
	}
	o.append = true
	return errors.Join(write(f), f.Close())
}

// add reports one run.
func (o *benchReport) add(r benchResult) error {
	o.rows++
	if r.m.Completed == 0 {
		o.failed = append(o.failed, fmt.Sprintf("%s: all %d requests failed: %s", r.shot, r.m.Requests, failuresText(r.m)))
	}
	if r.m.Void != "" {
		o.failed = append(o.failed, fmt.Sprintf("%s is void: %s", r.shot, r.m.Void))
	}
	result, err := o.meta.result(r)
	if err != nil {
		return err
	}
	if o.file != "" {
		if err := o.writeFile(result); err != nil {
			return err
		}
	}
	switch o.format {
	case "json":
		return writeJSON(o.w, result, "  ")
	case "yaml":
		return o.writeYAML(result)
	case "csv":
		return o.writeCSV(r)
	}
	if o.table {
		return o.writeRow(r)
	}
	return writeBlock(o.w, r)
}

// finish says what came of all runs: of a table with an SLO, the highest load that kept it.
func (o *benchReport) finish(steps []capacity.Step) error {
	if o.table && o.b.slo != nil && o.format == "text" {
		if _, err := io.WriteString(o.w, wrapped(highestText(steps, o.b.shots[0].concurrency > 0), "  ")); err != nil {
			return err
		}
	}
	switch {
	case len(o.failed) > 0:
		return errors.New(strings.Join(o.failed, "\n"))
	case o.b.slo != nil:
		return keptAny(steps)
	}
	return nil
}

// keptAny is the outcome of runs with an SLO. One that a late load generator decided is no evidence either way.
func keptAny(steps []capacity.Step) error {
	limited := 0
	for _, s := range steps {
		switch {
		case s.Limited != "":
			limited++
		case s.Pass:
			return nil
		}
	}
	if limited > 0 {
		return fmt.Errorf("%w: the load generator decided %d of %d; %s", errNoRunKept, limited, len(steps), moreCores)
	}
	return errNoRunKept
}

// capacity reports the answer of a search: to people on standard output, or beside what a program reads there, of which it is
// then the last object.
func (o *benchReport) capacity(a capacityAnswer) error {
	if o.file != "" {
		if err := o.writeFile(a); err != nil {
			return err
		}
	}
	var err error
	people := o.b.stderr
	switch o.format {
	case "text":
		people = o.w
	case "json":
		err = writeJSON(o.w, a, "  ")
	case "yaml":
		err = o.writeYAML(a)
	}
	if err != nil {
		return err
	}
	if _, err := io.WriteString(people, a.text()); err != nil {
		return err
	}
	if !a.Met && a.Capacity.Limited != "" {
		return fmt.Errorf("%w with the load generator in time; %s", errNoRunKept, moreCores)
	}
	if !a.Met {
		return errNoRunKept
	}
	return nil
}

// writeFile adds an object to the result file, in one line as in the files of vllm bench serve --append-result.
func (o *benchReport) writeFile(v any) error {
	if err := o.openFile(func(f *os.File) error { return writeJSON(f, v, "") }); err != nil {
		return fmt.Errorf("write the result file: %w", err)
	}
	return nil
}

// writeJSON writes one object, in one line where it is not indented.
func writeJSON(w io.Writer, v any, indent string) error {
	e := json.NewEncoder(w)
	e.SetIndent("", indent)
	return e.Encode(v)
}

// writeYAML writes one document.
func (o *benchReport) writeYAML(v any) error {
	text, err := yaml.MarshalWithOptions(v, yaml.UseJSONMarshaler())              // in the order of the JSON
	if plain := foreign.Text(string(text)); err == nil && plain != string(text) { // which it does not escape
		text, err = foreign.YAML(v)
	}
	if err != nil {
		return err
	}
	if o.documents++; o.documents > 1 {
		text = append([]byte("---\n"), text...)
	}
	_, err = o.w.Write(text)
	return err
}

// A column of the CSV.
type column struct {
	name  string
	value func(benchResult) string
}

// ms is a latency with the microseconds that a histogram of it would need.
func ms(v float64) string { return strconv.FormatFloat(v, 'f', 3, 64) }

// csvColumns begin with those of the sweeps that people keep: concurrency,req_s,out_tok_s,ttft_p50_ms,…
func csvColumns(closed bool) []column {
	first := column{"rate", func(r benchResult) string { return strconv.FormatFloat(r.rate, 'f', -1, 64) }}
	if closed {
		first = column{"concurrency", func(r benchResult) string { return strconv.Itoa(r.concurrency) }}
	}
	columns := []column{
		first,
		{"req_s", func(r benchResult) string { return ms(r.m.RequestThroughput) }},
		{"out_tok_s", func(r benchResult) string { return ms(r.m.OutputThroughput) }},
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
			column{l.name + "_p50_ms", func(r benchResult) string { return msOf(l.stats(r.m), median) }},
			column{l.name + "_p95_ms", func(r benchResult) string { return msOf(l.stats(r.m), func(s bench.Stats) float64 { return s.P95 }) }})
	}
	return append(columns,
		column{"ttft_p99_ms", func(r benchResult) string { return msOf(r.judged("p99 TTFT", r.m.TTFT), p99) }},
		column{"tpot_p50_ms", func(r benchResult) string { return msOf(r.m.TPOT, median) }},
		column{"tpot_p99_ms", func(r benchResult) string { return msOf(r.judged("p99 TPOT", r.m.TPOT), p99) }},
		column{"completed", func(r benchResult) string { return strconv.Itoa(r.m.Completed) }},
		column{"failed", func(r benchResult) string { return strconv.Itoa(r.m.Failed) }},
		column{"slo", verdictWord},
		column{"client_limited", func(r benchResult) string { return r.limited }})
}

func p99(s bench.Stats) float64 { return s.P99 }

// msOf is a figure of a latency, empty where none was measured.
func msOf(s bench.Stats, of func(bench.Stats) float64) string {
	if s.N == 0 {
		return ""
	}
	return ms(of(s))
}

// verdictWord is what the SLO says of a run in one word.
func verdictWord(r benchResult) string {
	switch {
	case r.m.Void != "":
		return "void"
	case r.verdict == nil:
		return ""
	case r.limited != "":
		return "client-limited"
	case r.verdict.Pass:
		return "passed"
	}
	return "failed"
}

func (o *benchReport) writeCSV(r benchResult) error {
	columns := csvColumns(r.concurrency > 0)
	names, values := make([]string, len(columns)), make([]string, len(columns))
	for i, c := range columns {
		names[i], values[i] = c.name, c.value(r)
	}
	out := csv.NewWriter(o.w)
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
