package sweep

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
)

// writeStandings names the highest load of each config within the SLO.
func (s *Sweep) writeStandings(t *render.Text) {
	longest, what := s.labelWidth(), s.varied()
	fmt.Fprintf(t, "\nHighest %s within the SLO\n%-*s %11s %8s %7s  %s\n", what, longest, "config", what, "vs base", "", "next on the grid")
	for i, st := range s.compare().all {
		rate := "none"
		switch {
		case st.Met():
			rate = s.loadWord(st.Rate)
		case st.Bound == "":
			rate = "-"
		}
		fmt.Fprintf(t, "%-*s %11s %8s %7s  %s\n", longest, s.label(i), rate, st.versus(), strings.ToUpper(st.mark), s.next(s.Configs[i], st.Capacity))
		if len(st.below) > 0 {
			var below []string
			for _, load := range st.below {
				below = append(below, s.loadWord(load))
			}
			t.Paragraph(fmt.Sprintf("    not monotone: it failed at %s, below its highest", strings.Join(below, ", ")), "      ")
		}
	}
	if text := s.conclusion(); text != "" {
		t.Paragraph(text, "")
	}
	if text := s.ranking(); text != "" {
		t.Paragraph(text, "  ")
	}
}

// loadWord is a load in a table.
func (s *Sweep) loadWord(load float64) string {
	if s.closed() {
		return strconv.Itoa(int(load))
	}
	return loadtest.RateText(load)
}

// next says what was found at the load above the highest.
func (s *Sweep) next(c *Config, h capacity.Capacity) string {
	i := slices.IndexFunc(s.Plan.Levels, func(l trial.Level) bool { return l.Load() == h.High })
	switch {
	case h.Limited != "":
		return "client-limited"
	case h.Bound == "":
		return "not measured"
	case i < 0 && len(c.Probes) < len(s.Plan.Levels):
		return "not measured"
	case i < 0:
		return "none: the grid ends here"
	}
	p, _ := c.at(s.Plan.Levels[i])
	return s.loadWord(h.High) + " " + verdictCell(c, p)
}

// detailLevel is the level of the detail table: the highest of the baseline, or the lowest of all where the baseline has none.
func (s *Sweep) detailLevel() (level trial.Level, why string) {
	base := s.compare().all[0]
	for _, l := range s.Plan.Levels {
		if base.Met() && l.Load() == base.Rate {
			return l, "the baseline's highest rate"
		}
	}
	if base.Limited != "" {
		return s.Plan.Levels[0], "the lowest rate; the load generator was late for the baseline"
	}
	return s.Plan.Levels[0], "the lowest rate; the baseline kept the SLO nowhere"
}
