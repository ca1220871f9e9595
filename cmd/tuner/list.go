package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/trial/capacity"
)

func listCommand() *cli.Command {
	return &cli.Command{
		Name:  "list",
		Usage: "list the studies in a root directory, the newest first",
		Description: `It reads what the studies have published, and disturbs none that runs.

Examples:
  tuner list
  tuner list --root /mnt/nfs/studies -o json`,
		Flags: []cli.Flag{rootFlag(), formatFlag()},
		Action: onDisk(func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			if c.Args().Len() > 0 {
				return usage("list takes no argument; name the directory with --root")
			}
			if root := c.String("root"); c.IsSet("root") { // the usual one is made by the first run
				if _, err := os.Stat(cmp.Or(root, ".")); err != nil {
					return usage("list the studies in --root (or TUNER_ROOT) %s: %w; is the disk mounted?", root, err)
				}
			}
			list, err := listStudies(c.Context, c.String("root"))
			if err != nil {
				return err
			}
			return list.write(c.App.Writer, format, render.Columns(c.App.Writer))
		}),
	}
}

// A studyList is what is known of each study of a root directory.
type studyList struct {
	Root    string       `json:"root"`
	Studies []studyEntry `json:"studies"`
}

type studyEntry struct {
	Name      string         `json:"name"`
	Link      string         `json:"link,omitempty"` // where the name leads, when it is a link
	State     studies.State  `json:"state,omitempty"`
	Note      string         `json:"note,omitempty"`
	Doubt     string         `json:"doubt,omitempty"` // why the state may be another by now
	Finished  int            `json:"finished"`
	Planned   int            `json:"planned,omitempty"`
	Met       bool           `json:"met"`
	Capacity  float64        `json:"capacity_rps,omitempty"` // see bound
	Bound     capacity.Bound `json:"bound,omitempty"`
	Changed   []string       `json:"changed_since,omitempty"` // what was accepted to have changed since the capacity was measured
	Simulated bool           `json:"simulated"`
	GPU       float64        `json:"gpu_seconds"`
	Updated   time.Time      `json:"updated,omitzero"`
	Behind    string         `json:"behind,omitempty"` // why this is not what was published last
	Error     string         `json:"error,omitempty"`  // why it cannot be read; all else is then unknown

	word string // for the state, where that is doubtful
}

func listStudies(ctx context.Context, root string) (*studyList, error) {
	names, err := studies.List(root)
	if err != nil {
		return nil, err
	}
	list := &studyList{Root: root, Studies: []studyEntry{}}
	for _, name := range names {
		list.Studies = append(list.Studies, entryOf(ctx, root, name))
	}
	slices.SortStableFunc(list.Studies, func(a, b studyEntry) int { return b.Updated.Compare(a.Updated) })
	return list, nil
}

// entryOf reads one study. One that cannot be read does not hide the others.
func entryOf(ctx context.Context, root, name string) studyEntry {
	e := studyEntry{Name: name}
	e.Link, _ = os.Readlink(filepath.Join(root, name)) // nearly all are none
	study, err := studies.ReadLive(ctx, filepath.Join(root, name), func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, unfinished) })
	if err != nil {
		e.Error = render.Error(err)
		return e
	}
	summary := report.Summarize(study, reportOptions(study))
	e.Behind = study.Behind
	e.State, e.Note, e.Updated, e.Finished, e.Planned = study.State, study.Note, study.Updated, summary.Finished, summary.Planned
	if word, why := report.StateOf(study); word != string(study.State) {
		e.word, e.Doubt = word, why
	}
	e.Simulated, e.GPU = summary.Simulated, summary.GPUSeconds
	if best, met := report.Best(study); met {
		c := best.Trial.Result.Capacity
		e.Met, e.Capacity, e.Bound, e.Changed = true, c.Rate, c.Bound, report.ChangedSince(study, best)
	}
	return e
}

// unfinished names the trials whose GPU time is that of their probes as yet.
func unfinished(study studies.Study) (numbers []int) {
	for _, t := range study.Trials {
		if t.State != studies.Done {
			numbers = append(numbers, t.Number)
		}
	}
	return numbers
}

func (l *studyList) write(w io.Writer, format string, width int) error {
	text, err := json.MarshalIndent(l, "", "  ")
	text = append(text, '\n')
	switch {
	case err != nil:
	case format == "text":
		text = []byte(l.text(width))
	case format == "yaml":
		text, err = foreign.YAML(l)
	}
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

// text is a table, with what there is more to say of a study below its row. Long names stand whole, for they are typed again.
func (l *studyList) text(width int) string {
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
	margin = min(margin, width/3) + 2
	var t strings.Builder
	lines := table.Lines(width)
	fmt.Fprintln(&t, lines[0])
	for i, e := range l.Studies {
		fmt.Fprintln(&t, lines[i+1])
		for _, remark := range e.remarks() {
			for _, line := range render.Wrap(remark, width-margin) {
				fmt.Fprintf(&t, "%*s%s\n", margin, "", line)
			}
		}
	}
	return t.String()
}

// cells are the row of a study.
func (e *studyEntry) cells() []string {
	if e.Error != "" {
		return []string{e.Name, "unreadable", "-", "-", "-", "-"}
	}
	done, best := fmt.Sprint(e.Finished), "-"
	if e.Planned > 0 {
		done += fmt.Sprintf(" of %d", e.Planned)
	}
	if e.Met {
		best = render.Number(e.Capacity)
		if e.Bound == capacity.AtLeast {
			best = ">=" + best
		}
	}
	if e.Simulated {
		best += " sim."
	}
	age := max(0, time.Since(e.Updated)) // the clock of another host may be ahead
	return []string{e.Name, cmp.Or(e.word, string(e.State)), done, best, render.Span(time.Duration(e.GPU * float64(time.Second))), render.Span(age) + " ago"}
}

// remarks are what a row does not say.
func (e *studyEntry) remarks() (all []string) {
	if e.Error != "" {
		return []string{"cannot be read: " + e.Error}
	}
	if e.Link != "" {
		all = append(all, "another name, by a link, of the study in "+e.Link)
	}
	if e.Doubt != "" {
		all = append(all, e.Doubt)
	}
	if e.State == studies.NotBegun && e.Note != "" {
		all = append(all, e.Note)
	}
	if len(e.Changed) > 0 {
		all = append(all, "its best was measured before a change that was accepted: "+strings.Join(e.Changed, "; "))
	}
	if e.Behind != "" {
		all = append(all, "this was published before; "+e.Behind)
	}
	return all
}
