// Package export writes a study for other programs: tables as CSV, and all of it as JSON. It reads no file and judges nothing.
package export

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"strconv"
	"time"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// format is the version of the JSON document. It grows when a field is removed or changes its meaning, but not when one
// is added.
const format = 1

// A head is a study without its trials and priors. The keys never change; docs/export.md lists them.
type head struct {
	Format  int               `json:"tuner_export"`
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Seed    string            `json:"seed"` // decimal text: a JavaScript number cannot hold 64 bits
	State   studies.State     `json:"state"`
	Note    string            `json:"note"`
	Created time.Time         `json:"created"`
	Updated time.Time         `json:"updated"`
	Commits int64             `json:"commits"`
	World   map[string]string `json:"world"`
	Found   map[string]string `json:"found"`
	Noted   map[string]string `json:"noted"`
	Events  []eventItem       `json:"events"`
	File    string            `json:"file"`
}

type eventItem struct {
	Time  time.Time `json:"time"`
	Kind  string    `json:"kind"`
	Text  string    `json:"text"`
	Trial int       `json:"trial"`
}

type trialItem struct {
	Number int            `json:"number"`
	Origin studies.Origin `json:"origin"`
	Point  space.Point    `json:"point"`
	Args   []string       `json:"args"`
	State  studies.State  `json:"state"`
	World  int            `json:"world"` // from 1: see studies.Study.WorldNumbers
	Began  time.Time      `json:"began"`
	Ended  *time.Time     `json:"ended"`  // null while it runs
	Result *trial.Result  `json:"result"` // null while it runs
	Probes []trial.Probe  `json:"probes"`
}

type priorItem struct {
	Source string        `json:"source"`
	Point  space.Point   `json:"point"`
	Args   []string      `json:"args"`
	Result trial.Result  `json:"result"`
	Probes []trial.Probe `json:"probes"`
}

// WriteJSON writes the whole study as one JSON object. It holds only one trial in memory at a time.
func WriteJSON(w io.Writer, s studies.Study, trials iter.Seq2[studies.Trial, error]) error {
	d := newDocument(w)
	d.head(headOf(s))
	worlds := s.WorldNumbers()
	d.begin("trials")
	for t, err := range trials {
		if err != nil {
			return err
		}
		if d.item(trialItemOf(t, worlds[t.Number])); d.err != nil {
			break
		}
	}
	d.end()
	d.begin("priors")
	for _, t := range s.Prior {
		d.item(priorItem{Source: t.Source, Point: mapped(t.Point), Args: listed(t.Args), Result: t.Result, Probes: listed(t.Probes)})
	}
	d.end()
	d.write("\n}\n")
	if err := d.close(); err != nil {
		return fmt.Errorf("write the study as JSON: %w", err)
	}
	return nil
}

func headOf(s studies.Study) head {
	h := head{
		Format: format, ID: s.ID, Name: s.Name, Seed: strconv.FormatUint(s.Seed, 10), State: s.State, Note: s.Note,
		Created: s.Created, Updated: s.Updated, Commits: s.Commits, World: s.World, Found: mapped(s.Found), Noted: mapped(s.Noted), Events: []eventItem{}, File: s.File,
	}
	for _, e := range s.Events {
		h.Events = append(h.Events, eventItem{e.Time, e.Kind, e.Text(), e.Trial})
	}
	return h
}

func trialItemOf(t studies.Trial, world int) trialItem {
	item := trialItem{Number: t.Number, Origin: t.Origin, Point: mapped(t.Point), Args: listed(t.Args), State: t.State, World: world, Began: t.Began, Probes: listed(t.Probes)}
	if t.State == studies.Done {
		item.Ended, item.Result = &t.Ended, &t.Result
	}
	return item
}

// A document writes an indented JSON object piece by piece. It keeps its first error and then writes nothing more.
type document struct {
	w     *bufio.Writer
	piece bytes.Buffer // the piece that is being encoded
	some  bool         // the open list has an item
	err   error
}

func newDocument(w io.Writer) *document { return &document{w: bufio.NewWriter(w)} }

func (d *document) write(text string) {
	if d.err == nil {
		_, d.err = d.w.WriteString(text)
	}
}

// encode writes v, without the tail of its text. All lines but the first begin with indent.
func (d *document) encode(v any, indent, tail string) {
	if d.err != nil {
		return
	}
	d.piece.Reset()
	e := json.NewEncoder(&d.piece)
	e.SetIndent(indent, "  ")
	e.SetEscapeHTML(false)
	if d.err = e.Encode(v); d.err == nil {
		_, d.err = d.w.Write(bytes.TrimSuffix(d.piece.Bytes(), []byte(tail)))
	}
}

// head writes the fields of v as the first fields of the object, and leaves the object open.
func (d *document) head(v any) { d.encode(v, "", "\n}\n") }

// begin opens a list.
func (d *document) begin(name string) {
	d.write(",\n  \"" + name + "\": [")
	d.some = false
}

func (d *document) item(v any) {
	if d.some {
		d.write(",")
	}
	d.some = true
	d.write("\n    ")
	d.encode(v, "    ", "\n")
}

// end closes the list.
func (d *document) end() {
	if d.some {
		d.write("\n  ")
	}
	d.write("]")
}

func (d *document) close() error {
	if d.err != nil {
		return d.err
	}
	return d.w.Flush()
}

// mapped returns a map that is never null in JSON.
func mapped[M ~map[string]string](m M) M {
	if m == nil {
		return M{}
	}
	return m
}

// listed returns a list that is never null in JSON.
func listed[T any](all []T) []T { return append([]T{}, all...) }
