package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial/capacity"
)

// A List describes the studies in a root directory. NewEntry makes the entry of a study. A study that cannot be read
// has an Entry with an Error.
type List struct {
	Root    string  `json:"root"`
	Studies []Entry `json:"studies"`
}

// An Entry is one study of a List.
type Entry struct {
	Name      string         `json:"name"`
	Link      string         `json:"link,omitempty"` // the path that the name leads to, when it is a link
	State     studies.State  `json:"state,omitempty"`
	Note      string         `json:"note,omitempty"`
	Doubt     string         `json:"doubt,omitempty"` // why the state may have changed since it was stored
	Finished  int            `json:"finished"`
	Planned   int            `json:"planned,omitempty"`
	Met       bool           `json:"met"`
	Capacity  float64        `json:"capacity_rps,omitempty"` // see the field Bound
	Bound     capacity.Bound `json:"bound,omitempty"`
	Changed   []string       `json:"changed_since,omitempty"` // changes accepted after the capacity was measured
	Simulated bool           `json:"simulated"`
	GPU       float64        `json:"gpu_seconds"`
	Updated   time.Time      `json:"updated,omitzero"`
	OtherName string         `json:"other_name,omitempty"` // a warning: the study's own name is not Name
	Behind    string         `json:"behind,omitempty"`     // why this entry is older than the newest snapshot
	Error     string         `json:"error,omitempty"`      // why the study cannot be read; only Name and Link are then known

	state string // the text that is shown instead of a State in doubt
}

// NewEntry summarizes a study.
func NewEntry(name string, study studies.Study, o Options) Entry {
	summary := Summarize(study, o)
	e := Entry{
		Name: name, State: study.State, Note: study.Explanation(), Updated: study.Updated, Behind: study.Behind,
		Finished: summary.Finished, Planned: summary.Planned, Simulated: summary.Simulated, GPU: summary.GPUSeconds,
	}
	if word, why := StateOf(study); word != string(study.State) {
		e.state, e.Doubt = word, why
	}
	if best, met := Best(study); met {
		c := best.Trial.Result.Capacity
		e.Met, e.Capacity, e.Bound, e.Changed = true, c.Rate, c.Bound, changedSince(study, best)
	}
	return e
}

// Sort orders the studies by the time of their last commit, the newest first.
func (l *List) Sort() {
	slices.SortStableFunc(l.Studies, func(a, b Entry) int { return b.Updated.Compare(a.Updated) })
}

// Text returns a table, with remarks below the row of each study. It never shortens a study's name, because users must
// be able to type it.
func (l *List) Text(width int) string {
	if len(l.Studies) == 0 {
		return fmt.Sprintf("no study in %s; `tuner run study.yaml` begins one\n", cmp.Or(l.Root, "."))
	}
	table := render.Table{Columns: []render.Column{
		{Head: "study"}, {Head: "state"}, {Head: "trials done", Right: true, Rank: 1}, {Head: "best req/s", Right: true, Rank: 2},
		{Head: "GPU time", Right: true, Rank: 4}, {Head: "stored", Rank: 3},
	}}
	margin := 0
	for _, e := range l.Studies {
		table.Rows = append(table.Rows, e.cells())
		margin = max(margin, render.Width(e.Name))
	}
	blank := strings.Repeat(" ", min(margin, width/3)+2)
	var t strings.Builder
	lines := table.Lines(width)
	fmt.Fprintln(&t, lines[0])
	for i, e := range l.Studies {
		fmt.Fprintln(&t, lines[i+1])
		for _, remark := range e.remarks() {
			t.WriteString(render.Hang(blank, remark, blank, width))
		}
	}
	return t.String()
}

// cells returns the cells of the study's row.
func (e *Entry) cells() []string {
	if e.Error != "" {
		return []string{e.Name, "unreadable", "-", "-", "-", "-"}
	}
	done, best := fmt.Sprint(e.Finished), "-"
	if e.Planned > 0 {
		done += fmt.Sprintf(" of %d", e.Planned)
	}
	if e.Met {
		best = rateText(e.Capacity, e.Bound)
	}
	if e.Simulated {
		best += " sim."
	}
	age := max(0, time.Since(e.Updated)) // the clock of another host may be ahead
	return []string{e.Name, cmp.Or(e.state, string(e.State)), done, best, render.Span(studies.Seconds(e.GPU)), render.Span(age) + " ago"}
}

// remarks returns the lines below the study's row.
func (e *Entry) remarks() []string {
	if e.Error != "" {
		return []string{"cannot be read: " + e.Error}
	}
	after := func(words, text string) string {
		if text == "" {
			return ""
		}
		return words + text
	}
	note := ""
	if e.State == studies.NotBegun {
		note = e.Note
	}
	return lo.Compact([]string{
		after("a link to the study in ", e.Link), e.OtherName, e.Doubt, note,
		after("its best was measured before an accepted change: ", strings.Join(e.Changed, "; ")),
		after("shown from an older snapshot: ", e.Behind),
	})
}
