package report

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
)

// A priorSource sums up the priors of one source.
type priorSource struct {
	Source string  `json:"source"`
	Trials int     `json:"trials"`
	Best   float64 `json:"best_rps,omitempty"` // as measured there; absent when nothing met the SLO
	Here   float64 `json:"here_rps,omitempty"` // the same point measured here; absent when it was not, or did not meet the SLO
	Trial  *int    `json:"trial,omitempty"`    // the trial that measured it here

	lost bool // the trial lost the race before anything passed
}

// priorSources returns the sources in the order in which they were added.
func priorSources(study studies.Study) (all []priorSource) {
	for _, priors := range lo.PartitionBy(study.Prior, func(t studies.Trial) string { return t.Source }) {
		s := priorSource{Source: priors[0].Source, Trials: len(priors)}
		point := "" // of the best prior
		for _, t := range priors {
			if rate := t.Result.Capacity.Rate; t.Met() && rate > s.Best {
				s.Best, point = rate, t.Point.String()
			}
		}
		for _, t := range study.Trials {
			raced := t.State == studies.Done && t.Result.Class == serverctl.DroppedByRace
			if s.Best > 0 && (measured(t) || raced) && t.Origin != studies.Confirmed && t.Point.String() == point {
				s.Trial = new(t.Number)
				s.lost = raced
				if t.Met() || t.Result.Capacity.Known() { // others have no capacity
					s.Here = t.Result.Capacity.Rate
				}
			}
		}
		all = append(all, s)
	}
	return all
}

// priors adds a line for each source.
func (l *lines) priors(study studies.Study) {
	name := "priors"
	for _, s := range priorSources(study) {
		l.Item(name, "%s", s)
		name = ""
	}
}

// String describes a source, such as "12 from result.txt; best 2.4 req/s there, 2.1 here (trial 2)".
func (s priorSource) String() string {
	text := fmt.Sprintf("%d from %s", s.Trials, s.Source)
	switch {
	case s.Best == 0:
		return text + "; none met the SLO"
	case s.Trial == nil:
		return text + fmt.Sprintf("; best %s req/s there, not measured here yet", render.Number(s.Best))
	case s.Here == 0 && s.lost:
		return text + fmt.Sprintf("; best %s req/s there, lost the race here (trial %d)", render.Number(s.Best), *s.Trial)
	case s.Here == 0:
		return text + fmt.Sprintf("; best %s req/s there, failed at every rate here (trial %d)", render.Number(s.Best), *s.Trial)
	}
	return text + fmt.Sprintf("; best %s req/s there, %s here (trial %d)", render.Number(s.Best), render.Number(s.Here), *s.Trial)
}

// PriorTable lists at most limit priors, the best first, in lines of at most width columns.
func PriorTable(trials []studies.Trial, limit, width int) string {
	met, unmet := lo.FilterReject(trials, func(t studies.Trial, _ int) bool { return t.Met() })
	for _, some := range [][]studies.Trial{met, unmet} {
		slices.SortStableFunc(some, func(a, b studies.Trial) int {
			return cmp.Compare(b.Result.Capacity.Rate, a.Result.Capacity.Rate)
		})
	}
	sorted := slices.Concat(met, unmet)
	table := render.Table{Indent: 2, Columns: []render.Column{{Right: true}, {}, {Wraps: true, Min: minPoint}}}
	for _, t := range sorted[:min(limit, len(sorted))] {
		table.Rows = append(table.Rows, []string{shortCapacity(t) + " req/s", render.Clip(resultText(t), maxResult), cmp.Or(t.Point.String(), nothingSet)})
	}
	var l lines
	for _, line := range table.Lines(width) {
		l.Line("%s", line)
	}
	if more := len(sorted) - limit; more > 0 {
		l.Line("  and %d more", more)
	}
	return l.String()
}
