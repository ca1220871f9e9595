package prior

import (
	"fmt"
	"strings"

	"github.com/samber/lo"

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
		t.Paragraph(fmt.Sprintf("  left out: %s: %s", r.From, r.Why), "    ")
	}
	for _, note := range s.Notes {
		t.Paragraph("  note: "+note, "    ")
	}
	return t.String()
}

// reasons groups by reason what was left out.
func reasons(left []Left) (all []Left) {
	for _, group := range lo.PartitionBy(left, func(l Left) string { return l.Why }) {
		first := group[0]
		if more := len(group) - 1; more > 0 {
			first.From += fmt.Sprintf(" and %d more", more)
		}
		all = append(all, first)
	}
	if more := len(all) - maxRows; more > 0 {
		all = append(all[:maxRows], Left{fmt.Sprintf("%d more", more), "for other reasons"})
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
			names := lo.Map(s.Parameters(), func(p space.Parameter, _ int) string { return p.Name })
			return nil, fmt.Errorf("%s: this study does not search %s; %s", pair, name, space.DidYouMean(name, names))
		}
		flags[name] = value
	}
	return flags, nil
}
