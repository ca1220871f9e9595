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
	Best   float64 `json:"best_rps,omitempty"` // best capacity as measured in the source; absent when nothing met the SLO there
	Here   float64 `json:"here_rps,omitempty"` // capacity of the same point in this study; absent when the point was not measured in this study, or did not meet the SLO
	Trial  *int    `json:"trial,omitempty"`    // the trial of this study that measured the point

	Predicted bool `json:"predicted,omitempty"` // the simulator predicted the trials, so none of them was measured

	scaled bool // the best point is the default, to which the simulator was scaled
	lost   bool // the trial lost the race before anything passed
}

// priorSources returns the sources in the order in which they were added.
func priorSources(study studies.Study) (all []priorSource) {
	for _, priors := range lo.PartitionBy(study.Prior, func(t studies.Trial) string { return t.Source }) {
		s := priorSource{Source: priors[0].Source, Trials: len(priors), Predicted: priors[0].Predicted()}
		point := "" // the point of the best prior
		for _, t := range priors {
			if rate := t.Result.Capacity.Rate; t.Met() && rate > s.Best {
				s.Best, point = rate, t.Point.String()
			}
		}
		for _, t := range study.Trials {
			raced := t.State == studies.Done && t.Result.Class == serverctl.DroppedByRace
			if s.Best > 0 && (measured(t) || raced) && t.Origin != studies.Confirmed && t.Point.String() == point {
				s.Trial = new(t.Number)
				s.lost, s.scaled = raced, t.Origin == studies.Default
				if t.Met() || t.Result.Capacity.Known() { // other trials have no capacity
					s.Here = t.Result.Capacity.Rate
				}
			}
		}
		all = append(all, s)
	}
	return all
}

// addPriors adds a line for each source.
func (l *lines) addPriors(study studies.Study) {
	name := "priors"
	for _, s := range priorSources(study) {
		l.Item(name, "%s", s)
		name = ""
	}
}

// String describes a source, such as "12 from result.txt; best 2.4 req/s there, 2.1 here (trial 2)".
func (s priorSource) String() string {
	if s.Predicted {
		return s.predicted()
	}
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

// predicted describes the predictions of the simulator, such as "97 points predicted by the simulator; best 2.5 req/s
// predicted, 2.4 measured (trial 1)".
func (s priorSource) predicted() string {
	text := fmt.Sprintf("%s predicted by %s; best %s req/s predicted", render.Count(s.Trials, "point"), s.Source, render.Number(s.Best))
	switch {
	case s.Best == 0:
		return fmt.Sprintf("%s predicted by %s; none keeps the SLO", render.Count(s.Trials, "point"), s.Source)
	case s.Trial == nil:
		return text + ", not measured yet"
	case s.scaled:
		return text + fmt.Sprintf(", for the default, to which the simulator was scaled (trial %d)", *s.Trial)
	case s.Here == 0 && s.lost:
		return text + fmt.Sprintf(", lost the race when measured (trial %d)", *s.Trial)
	case s.Here == 0:
		return text + fmt.Sprintf(", failed at every rate when measured (trial %d)", *s.Trial)
	}
	return text + fmt.Sprintf(", %s measured (trial %d)", render.Number(s.Here), *s.Trial)
}

// PriorTable lists the priors, the best first, in lines of at most width columns. It lists at most limit priors.
func PriorTable(trials []studies.Trial, limit, width int) string {
	met, unmet := lo.FilterReject(trials, func(t studies.Trial, _ int) bool { return t.Met() })
	for _, some := range [][]studies.Trial{met, unmet} {
		slices.SortStableFunc(some, func(a, b studies.Trial) int {
			return cmp.Compare(b.Result.Capacity.Rate, a.Result.Capacity.Rate)
		})
	}
	sorted := slices.Concat(met, unmet)
	table := render.Table{Indent: 2, Columns: []render.Column{{Right: true}, {}, {Wraps: true, ShrinkTo: minPoint}}}
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
