package prior

import (
	"fmt"
	"strings"

	"vllmtuner/render"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/space"
)

const maxRows = 10 // trials, and reasons to leave some out, that Text shows

// Text says what was taken from the source, the best first, and what was left out and why.
func (s *Source) Text() string {
	var t strings.Builder
	t.WriteString(render.Paragraph(fmt.Sprintf("%s (%s): %d taken, %d left out", s.Name, s.Kind, len(s.Taken), len(s.Left)), "  ", render.DefaultWidth))
	for line := range strings.Lines(report.PriorTable(s.Trials(), maxRows)) {
		t.WriteString(wrapLastCell(line))
	}
	for _, r := range reasons(s.Left) {
		t.WriteString(render.Paragraph(fmt.Sprintf("  left out: %s: %s", r.from, r.why), "    ", render.DefaultWidth))
	}
	for _, note := range s.Notes {
		t.WriteString(render.Paragraph("  note: "+note, "    ", render.DefaultWidth))
	}
	return t.String()
}

// wrapLastCell wraps the last cell of a table's line that is too long, below itself.
func wrapLastCell(line string) string {
	start := strings.LastIndex(line, "  ") + len("  ")
	if len(line) <= render.DefaultWidth+len("\n") || strings.TrimSpace(line[:start]) == "" {
		return line
	}
	return render.Hang(line[:start], line[start:], strings.Repeat(" ", start), render.DefaultWidth)
}

// A reason is why some of a source was left out.
type reason struct {
	from, why string
	n         int
}

// reasons groups what was left out by why.
func reasons(left []Left) (all []reason) {
	index := map[string]int{}
	for _, l := range left {
		if i, known := index[l.Why]; known {
			all[i].n++
			continue
		}
		index[l.Why] = len(all)
		all = append(all, reason{l.From, l.Why, 1})
	}
	for i := range all {
		if all[i].n > 1 {
			all[i].from += fmt.Sprintf(" and %d more", all[i].n-1)
		}
	}
	if more := len(all) - maxRows; more > 0 {
		all = append(all[:maxRows], reason{from: fmt.Sprintf("%d more", more), why: "for other reasons"})
	}
	return all
}

// ParseSet reads FLAG=VALUE pairs, the searched flags that the user sets for all files.
func ParseSet(s *space.Space, pairs []string) (map[string]string, error) {
	flags := map[string]string{}
	for _, pair := range pairs {
		name, value, ok := strings.Cut(pair, "=")
		name = strings.ReplaceAll(strings.TrimLeft(name, "-"), "_", "-")
		switch {
		case !ok || name == "" || value == "":
			return nil, fmt.Errorf("%s: write it as --set max-num-seqs=128", pair)
		case s.Parameter(name) == nil:
			var names []string
			for _, p := range s.Parameters() {
				names = append(names, p.Name)
			}
			return nil, fmt.Errorf("%s: this study does not search %s; %s", pair, name, space.DidYouMean(name, names))
		}
		flags[name] = value
	}
	return flags, nil
}
