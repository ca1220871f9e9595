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

// Format is the version of the JSON document. A field may be added to it; one that goes, or that means something else, makes the next.
const Format = 1

// A head is a whole study but for its trials and priors, which follow it one by one. The names are for good: docs/export.md has them.
type head struct {
	Format  int               `json:"tuner_export"`
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Seed    string            `json:"seed"` // decimal: an unsigned 64-bit number does not fit a number of JavaScript's
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

// WriteJSON writes all that is known of the study as one JSON object. It holds one of the trials at a time.
func WriteJSON(w io.Writer, s studies.Study, trials iter.Seq2[studies.Trial, error]) error {
	d := newDocument(w)
	d.head(headOf(s))
	worlds := s.WorldNumbers()
	d.begin("trials")
	for t, err := range trials {
		if err != nil {
			return err
		}
		if d.item(trialItemOf(t, worlds[t.Number])); d.err != nil { // nobody reads on
			break
		}
	}
	d.end()
	d.begin("priors")
	for _, t := range s.Prior {
		d.item(priorItem{Source: t.Source, Point: pointOf(t), Args: listed(t.Args), Result: t.Result, Probes: listed(t.Probes)})
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
		Format: Format, ID: s.ID, Name: s.Name, Seed: strconv.FormatUint(s.Seed, 10), State: s.State, Note: s.Note,
		Created: s.Created, Updated: s.Updated, Commits: s.Commits, World: s.World, Found: known(s.Found), Noted: known(s.Noted), Events: []eventItem{}, File: s.File,
	}
	for _, e := range s.Events {
		h.Events = append(h.Events, eventItem{e.Time, e.Kind, e.Text(), e.Trial})
	}
	return h
}

func trialItemOf(t studies.Trial, world int) trialItem {
	item := trialItem{Number: t.Number, Origin: t.Origin, Point: pointOf(t), Args: listed(t.Args), State: t.State, World: world, Began: t.Began, Probes: listed(t.Probes)}
	if t.State == studies.Done {
		item.Ended, item.Result = &t.Ended, &t.Result
	}
	return item
}

// A document is an indented JSON object that is written piece by piece. Its first error stays.
type document struct {
	w     *bufio.Writer
	piece bytes.Buffer // one is encoded at a time
	some  bool         // the list that was begun has an item
	err   error
}

func newDocument(w io.Writer) *document { return &document{w: bufio.NewWriter(w)} }

func (d *document) write(text string) {
	if d.err == nil {
		_, d.err = d.w.WriteString(text)
	}
}

// encode writes v, whose lines but for the first are indented so.
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

// head writes the fields that are no lists of pieces, and leaves the object open.
func (d *document) head(v any) { d.encode(v, "", "\n}\n") }

// begin begins a list.
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

// end ends the list.
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

func pointOf(t studies.Trial) space.Point {
	if t.Point == nil {
		return space.Point{}
	}
	return t.Point
}

// known is never null.
func known(facts map[string]string) map[string]string {
	if facts == nil {
		return map[string]string{}
	}
	return facts
}

// listed is never null.
func listed[T any](all []T) []T { return append([]T{}, all...) }
