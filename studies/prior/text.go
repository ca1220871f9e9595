package prior

import (
	"fmt"
	"strings"

	"vllmtuner/render"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/space"
)

const maxRows = 10 // number of trials, and of reasons to leave some out, that Text shows

// Text lists the trials that were taken from the source, the best first, and says why others were left out.
func (s *Source) Text() string {
	var t render.Text
	t.Paragraph(fmt.Sprintf("%s (%s): %d taken, %d left out", s.Name, s.Kind, len(s.Taken), len(s.Left)), "  ")
	t.WriteString(report.PriorTable(s.Taken, maxRows))
	for _, r := range reasons(s.Left) {
		t.Paragraph(fmt.Sprintf("  left out: %s: %s", r.from, r.why), "    ")
	}
	for _, note := range s.Notes {
		t.Paragraph("  note: "+note, "    ")
	}
	return t.String()
}

// A reason says why n things of a source were left out.
type reason struct {
	from, why string
	n         int
}

// reasons groups by reason what was left out.
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

// ParseSet parses the FLAG=VALUE pairs of --set, which must name searched flags.
func ParseSet(s *space.Space, pairs []string) (map[string]string, error) {
	flags := map[string]string{}
	for _, pair := range pairs {
		name, value, ok := strings.Cut(pair, "=")
		name = flagName(name)
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
