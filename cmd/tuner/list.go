package main

import (
	"cmp"
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
	"vllmtuner/studies"
	"vllmtuner/studies/report"
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
			list, err := listStudies(c.String("root"))
			if err != nil {
				return err
			}
			return list.write(c.App.Writer, format)
		}),
	}
}

// A studyList is what is known of each study of a root directory.
type studyList struct {
	Root    string       `json:"root"`
	Studies []studyEntry `json:"studies"`
}

type studyEntry struct {
	Name      string        `json:"name"`
	Link      string        `json:"link,omitempty"` // where the name leads, when it is a link
	State     studies.State `json:"state,omitempty"`
	Note      string        `json:"note,omitempty"`
	Finished  int           `json:"finished"`
	Planned   int           `json:"planned,omitempty"`
	Met       bool          `json:"met"`
	Capacity  float64       `json:"capacity_rps,omitempty"`
	Changed   []string      `json:"changed_since,omitempty"` // what was accepted to have changed since the capacity was measured
	Simulated bool          `json:"simulated"`
	GPU       float64       `json:"gpu_seconds"`
	Updated   time.Time     `json:"updated,omitzero"`
	Behind    string        `json:"behind,omitempty"` // why this is not what was published last
	Error     string        `json:"error,omitempty"`  // why it cannot be read; all else is then unknown
}

func listStudies(root string) (*studyList, error) {
	names, err := studies.List(root)
	if err != nil {
		return nil, err
	}
	list := &studyList{Root: root, Studies: []studyEntry{}}
	for _, name := range names {
		list.Studies = append(list.Studies, entryOf(root, name))
	}
	slices.SortStableFunc(list.Studies, func(a, b studyEntry) int { return b.Updated.Compare(a.Updated) })
	return list, nil
}

// entryOf reads one study. One that cannot be read does not hide the others.
func entryOf(root, name string) studyEntry {
	e := studyEntry{Name: name}
	e.Link, _ = os.Readlink(filepath.Join(root, name)) // nearly all are none
	study, err := studies.ReadSummary(filepath.Join(root, name), unfinished)
	if err != nil {
		e.Error = inWords(err)
		return e
	}
	summary := report.Summarize(study, reportOptions(study))
	e.Behind = study.Behind
	e.State, e.Note, e.Updated, e.Finished, e.Planned = study.State, study.Note, study.Updated, summary.Finished, summary.Planned
	e.Simulated, e.GPU = summary.Simulated, summary.GPUSeconds
	if best, met := report.Best(study); met {
		e.Met, e.Capacity, e.Changed = true, best.Trial.Result.Capacity.Rate, report.ChangedSince(study, best)
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

func (l *studyList) write(w io.Writer, format string) error {
	text, err := json.MarshalIndent(l, "", "  ")
	text = append(text, '\n')
	switch {
	case err != nil:
	case format == "text":
		text = []byte(l.text())
	case format == "yaml":
		text, err = foreign.YAML(l)
	}
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

// text is a table of 80 columns. Long names stand whole, for they are typed again.
func (l *studyList) text() string {
	if len(l.Studies) == 0 {
		return fmt.Sprintf("no study in %s; `tuner run study.yaml` begins one\n", cmp.Or(l.Root, "."))
	}
	width := len("study")
	for _, e := range l.Studies {
		width = max(width, len(e.Name))
	}
	var t textLines
	indent := strings.Repeat(" ", width+2)
	fmt.Fprintf(&t, "%-*s  %-8s %8s %14s %10s  %s\n", width, "study", "state", "trials", "best req/s", "GPU time", "stored")
	for _, e := range l.Studies {
		if e.Error != "" {
			why := wrapped(indent+"cannot be read: "+e.Error, indent)
			fmt.Fprintf(&t, "%-*s%s", len(indent), e.Name, why[len(indent):])
			continue
		}
		trials, best := fmt.Sprint(e.Finished), "-"
		if e.Planned > 0 {
			trials += fmt.Sprintf("/%d", e.Planned)
		}
		if e.Met {
			best = fmt.Sprintf("%.3g", e.Capacity)
		}
		if e.Simulated {
			best += " sim."
		}
		age := max(0, time.Since(e.Updated)) // the clock of another host may be ahead
		fmt.Fprintf(&t, "%-*s  %-8s %8s %14s %10s  %s ago\n", width, e.Name, e.State, trials, best, roughly(time.Duration(e.GPU*float64(time.Second))), roughly(age))
		if e.Link != "" {
			t.WriteString(wrapped(indent+"another name, by a link, of the study in "+e.Link, indent))
		}
		if len(e.Changed) > 0 {
			t.WriteString(wrapped(indent+"its best was measured before a change that was accepted: "+strings.Join(e.Changed, "; "), indent))
		}
		if e.Behind != "" {
			t.WriteString(wrapped(indent+"this was published before; "+e.Behind, indent))
		}
	}
	return t.String()
}
