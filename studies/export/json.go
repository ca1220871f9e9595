// Package export writes a study for other programs: tables as CSV, and all of it as JSON. It reads no file and judges
// nothing.
package export

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"iter"
	"strconv"
	"time"

	"github.com/samber/lo"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// format is the version of the JSON document. The number increases when a field is removed or changes its meaning, but
// not when a field is added.
const format = 1

// A document is a study as JSON. The keys never change; docs/export.md lists them.
type document struct {
	Format  int                    `json:"tuner_export"`
	ID      string                 `json:"id"`
	Name    string                 `json:"name"`
	Seed    string                 `json:"seed"` // decimal text: a JavaScript number cannot hold 64 bits
	State   studies.State          `json:"state"`
	Note    string                 `json:"note"`
	Created time.Time              `json:"created"`
	Updated time.Time              `json:"updated"`
	Commits int64                  `json:"commits"`
	Spent   map[trial.Part]float64 `json:"spent_seconds"` // time of all runs, by parts; empty in a study of an older tuner
	World   map[string]string      `json:"world"`
	Found   map[string]string      `json:"found"`
	Noted   map[string]string      `json:"noted"`
	Events  []eventItem            `json:"events"`
	File    string                 `json:"file"`
	Trials  []trialItem            `json:"trials"` // empty here, because WriteJSON writes the trials one at a time
	Priors  []priorItem            `json:"priors"`
}

type eventItem struct {
	Time  time.Time `json:"time"`
	Kind  string    `json:"kind"`
	Text  string    `json:"text"`
	Trial int       `json:"trial"`
}

type trialItem struct {
	Number int               `json:"number"`
	Origin studies.Origin    `json:"origin"`
	Point  space.Point       `json:"point"`
	Args   []string          `json:"args"`
	Env    map[string]string `json:"env,omitempty"` // environment variables of the point
	State  studies.State     `json:"state"`
	World  int               `json:"world"` // from 1: see studies.Study.WorldNumbers
	Began  time.Time         `json:"began"`
	Ended  *time.Time        `json:"ended"`  // null while it runs
	Result *trial.Result     `json:"result"` // null while it runs
	Probes []trial.Probe     `json:"probes"`
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
	whole, err := foreign.JSON(documentOf(s), "", "  ")
	if err != nil {
		return fmt.Errorf("write the study as JSON: %w", err)
	}
	before, after, _ := bytes.Cut(whole, []byte(noTrials))
	out := bufio.NewWriter(w) // the writer keeps the error of a failed write, and Flush returns that error
	out.Write(before)
	out.WriteString("\n  \"trials\": [")
	worlds, between, end := s.WorldNumbers(), "\n    ", "]"
	for t, unread := range trials {
		if unread != nil {
			return unread
		}
		var item []byte
		if item, err = foreign.JSON(trialItemOf(t, worlds[t.Number]), "    ", "  "); err != nil {
			break
		}
		out.WriteString(between)
		if _, err = out.Write(item); err != nil {
			break
		}
		between, end = ",\n    ", "\n  ]"
	}
	out.WriteString(end)
	out.Write(after)
	out.WriteString("\n")
	if err := cmp.Or(err, out.Flush()); err != nil {
		return fmt.Errorf("write the study as JSON: %w", err)
	}
	return nil
}

// noTrials is the empty list of trials in a document. The study's own texts cannot contain it, because JSON escapes
// line breaks.
const noTrials = "\n  \"trials\": []"

func documentOf(s studies.Study) document {
	d := document{
		Format: format, ID: s.ID, Name: s.Name, Seed: strconv.FormatUint(s.Seed, 10), State: s.State, Note: s.Explanation(), Created: s.Created,
		Updated: s.Updated, Commits: s.Commits, Spent: lo.MapValues(s.Spent, func(d time.Duration, _ trial.Part) float64 { return d.Seconds() }), World: s.World, Found: mapped(s.Found), Noted: mapped(s.Noted), Events: []eventItem{},
		File: s.File, Trials: []trialItem{}, Priors: []priorItem{},
	}
	for _, e := range s.Events {
		d.Events = append(d.Events, eventItem{e.Time, e.Kind, e.Text(), e.Trial})
	}
	for _, t := range s.Prior {
		d.Priors = append(d.Priors, priorItem{t.Source, mapped(t.Point), listed(t.Args), t.Result, listed(t.Probes)})
	}
	return d
}

func trialItemOf(t studies.Trial, world int) trialItem {
	item := trialItem{
		Number: t.Number, Origin: t.Origin, Point: mapped(t.Point), Args: listed(t.Args), Env: t.Point.Env(), State: t.State, World: world,
		Began: t.Began, Probes: listed(t.Probes),
	}
	if t.State == studies.Done {
		item.Ended, item.Result = &t.Ended, &t.Result
	}
	return item
}

// mapped returns the map m, or an empty map instead of nil, which would be null in JSON.
func mapped[M ~map[string]string](m M) M {
	if m == nil {
		return M{}
	}
	return m
}

// listed returns a copy of the list all, or an empty list instead of nil, which would be null in JSON.
func listed[T any](all []T) []T { return append([]T{}, all...) }
