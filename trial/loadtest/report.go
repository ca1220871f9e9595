package loadtest

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/studies/rights"
	"vllmtuner/trial/capacity"
)

// ErrNoRunKept means that no run kept the SLO with the load generator on time.
var ErrNoRunKept = errors.New("no run kept the SLO")

// MoreCores tells the user what to do about a late load generator.
const MoreCores = "run tuner where it always has a core of its own and no other work runs"

// The formats of a Report.
const (
	FormatText = "text"
	FormatCSV  = "csv"
	FormatJSON = "json"
	FormatYAML = "yaml"
)

// Formats lists all formats.
var Formats = []string{FormatText, FormatCSV, FormatJSON, FormatYAML}

// A Report writes the result of each run when the run ends.
type Report struct {
	Bench  *Bench
	Out    io.Writer
	Format string
	Meta   Meta
	File   string // path of the result file, written as JSON; "" for none
	Append bool   // add to File instead of replacing it

	rows      int
	documents int      // number of YAML documents written so far
	failed    []string // runs that completed no request or are void
}

// table reports whether there are several runs. Each run is then one line of a table.
func (o *Report) table() bool { return len(o.Bench.Runs) > 1 || o.Bench.Search != nil }

// Begin checks before the first run that the result file can be written.
func (o *Report) Begin() error {
	if o.File == "" {
		return nil
	}
	return o.openFile(func(*os.File) error { return nil })
}

// openFile opens the result file for one write. The first write empties the file unless Append is set.
func (o *Report) openFile(write func(*os.File) error) error {
	how := os.O_CREATE | os.O_WRONLY | os.O_APPEND
	if !o.Append {
		how |= os.O_TRUNC
	}
	f, err := os.OpenFile(o.File, how, rights.File(filepath.Dir(o.File)))
	if err != nil {
		return InputError{fmt.Errorf("--result-file: %w", err)}
	}
	o.Append = true
	return errors.Join(write(f), f.Close())
}

func (o *Report) add(r Result) error {
	o.rows++
	if r.Measurement.Completed == 0 {
		o.failed = append(o.failed, fmt.Sprintf("%s: %s failed: %s", r.Run, render.All(r.Measurement.Requests, "request"), failuresText(r.Measurement)))
	}
	if r.Measurement.Void != "" {
		o.failed = append(o.failed, fmt.Sprintf("%s is void: %s", r.Run, r.Measurement.Void))
	}
	result, err := o.Meta.result(o.Bench, r)
	if err == nil {
		err = o.document(result)
	}
	switch {
	case err != nil:
		return err
	case o.Format == FormatCSV:
		return o.writeCSV(r)
	case o.Format != FormatText:
		return nil
	case o.table():
		return o.writeRow(r)
	}
	return writeBlock(o.Out, r, fmt.Sprintf("%s, seed %d", o.Bench.workload(), o.Bench.Load.Seed))
}

// document writes a result for programs to the result file. If the format is JSON or YAML, it also writes the result to
// Out. In the file each result takes one line, as vllm bench serve --append-result writes it.
func (o *Report) document(v any) error {
	if o.File != "" {
		line, err := foreign.JSON(v, "", "")
		if err == nil {
			err = o.openFile(func(f *os.File) error { _, err := f.Write(append(line, '\n')); return err })
		}
		if err != nil {
			return fmt.Errorf("write the result file: %w", err)
		}
	}
	switch o.Format {
	case FormatJSON:
		return foreign.WriteJSON(o.Out, v)
	case FormatYAML:
		return o.writeYAML(v)
	}
	return nil
}

// Finish ends the report. Below a table it names the highest load that kept the SLO.
func (o *Report) Finish(steps []capacity.Step) error {
	if o.table() && o.Bench.SLO != nil && o.Format == FormatText {
		if _, err := io.WriteString(o.Out, render.Paragraph(HighestText(steps, o.Bench.Runs[0].Streams > 0), "  ", render.Columns(o.Out))); err != nil {
			return err
		}
	}
	switch {
	case len(o.failed) > 0:
		return errors.New(strings.Join(o.failed, "\n"))
	case o.Bench.SLO != nil:
		return keptAny(steps)
	}
	return nil
}

// keptAny returns nil if a run kept the SLO, and otherwise ErrNoRunKept. A run with a late load generator counts
// neither as kept nor as broken.
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
		return fmt.Errorf("%w: the load generator's delay decided %s; %s", ErrNoRunKept, render.Of(limited, len(steps), "verdict"), MoreCores)
	}
	return ErrNoRunKept
}

// capacity reports the answer of a search. In JSON and YAML the answer is the last object. The text for people then
// goes to the notes.
func (o *Report) capacity(a Answer) error {
	if err := o.document(a); err != nil {
		return err
	}
	people := o.Bench.Notes
	if o.Format == FormatText {
		people = o.Out
	}
	if _, err := io.WriteString(people, a.text(render.Columns(people))); err != nil {
		return err
	}
	if !a.Met && a.Capacity.Limited != "" {
		return fmt.Errorf("%w with the load generator on time; %s", ErrNoRunKept, MoreCores)
	}
	if !a.Met {
		return ErrNoRunKept
	}
	return nil
}

// writeYAML writes one document.
func (o *Report) writeYAML(v any) error {
	text, err := foreign.YAML(v)
	if err != nil {
		return err
	}
	if o.documents++; o.documents > 1 {
		text = append([]byte("---\n"), text...)
	}
	_, err = o.Out.Write(text)
	return err
}

// Meta has the settings that all results of one command share.
type Meta struct {
	Burstiness float64
	Metadata   map[string]string
	Detailed   bool // whether to list the single requests too
}

// Check returns an error if a key of the metadata is already a key of the result.
func (m Meta) Check(b *Bench) error {
	_, err := m.result(b, Result{})
	return err
}

// result returns one run with the field names of vllm bench serve.
func (m Meta) result(b *Bench, r Result) (bench.VLLMResult, error) {
	backend := "openai"
	if b.Client.Endpoint == workload.Chat {
		backend = "openai-chat"
	}
	var details []bench.Sample
	if m.Detailed {
		details = r.samples
	}
	measured := r.Measurement
	if r.Measurement.Queue.N > 0 && len(r.samples) > 0 { // vLLM's latencies do not include the time that a request waits in the client
		from := bench.WithoutQueue(r.samples)
		measured = bench.Measure(bench.Run{Samples: from, Series: r.Measurement.Series, Lateness: r.Measurement.Lateness}, r.scope)
		measured.Queue = r.Measurement.Queue
		if m.Detailed {
			details = from
		}
	}
	return bench.NewVLLMResult(measured, bench.VLLMMeta{
		Date: time.Now(), Backend: backend, Model: b.Client.Model, Prompts: r.planned, Rate: r.Rate,
		Burstiness: m.Burstiness, MaxConcurrency: cmp.Or(r.Streams, b.Client.MaxInFlight), Metadata: m.Metadata,
		Workload: b.workload(), Seed: b.Load.Seed, Natural: b.Client.Natural,
	}, details)
}
