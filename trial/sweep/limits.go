package sweep

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// limits says what the tables of this sweep cannot tell.
func (s *Sweep) limits() []string {
	all, texts := s.standings(), []string{}
	if text := s.gridLimit(all); text != "" {
		texts = append(texts, text)
	}
	tied := 0
	for _, st := range all {
		if st.mark == "tie" {
			tied++
		}
	}
	if tied > 1 {
		texts = append(texts, fmt.Sprintf("Ties: %d of %d configs share the highest load, and the grid does not order them.", tied, len(all)))
	}
	texts = append(texts, s.drawLimit())
	if s.Cache == trial.Carried {
		texts = append(texts, "The cache: each load finds the prompts of those before it in the prefix cache. Another order, or another first load, gives other figures.")
	} else {
		texts = append(texts, "The cache: each load begins with an empty prefix cache, as no server in production does.")
	}
	if s.closed() {
		texts = append(texts, "The closed loop: the next request waits until one ends, so that no server is ever asked for more than it can do. It ranks configs cheaply, and is no capacity: where more streams bring no more requests per second, and where TPOT binds, its order misleads.")
	} else {
		texts = append(texts, "The end: nothing is sent after the last request, so that the last ones see an emptying server and the figures are too good where answers are long.")
	}
	return append(texts, "`tuner run` searches the flags and the rate between the grid's, in windows that last long enough for a p99, with load before and after them.")
}

// drawLimit says how few requests decide the highest percentile of the SLO.
func (s *Sweep) drawLimit() string {
	highest := slices.MaxFunc(s.SLO.Limits, func(a, b slo.Limit) int { return cmp.Compare(a.Percentile, b.Percentile) })
	slow := max(1, int(math.Round((100-highest.Percentile)/100*float64(s.Plan.Requests))))
	slowest := fmt.Sprintf("the %d slowest", slow)
	if slow == 1 {
		slowest = "a single one"
	}
	return fmt.Sprintf("One draw: the p%g of %s hangs on %s. Another seed asks other requests at other times, and near a limit its verdicts are others.",
		highest.Percentile, render.Count(s.Plan.Requests, "request"), slowest)
}

// gridLimit says between which two loads the highest one of the best config lies.
func (s *Sweep) gridLimit(all []standing) string {
	var of capacity.Capacity
	for _, st := range all {
		if h := st.highest; h.Bound == capacity.Exact && h.Rate > of.Rate {
			of = h
		}
	}
	if of.Rate == 0 {
		return ""
	}
	return fmt.Sprintf("The grid: between %s and %s nothing was measured. A highest load of %s may be anything up to %.0f %% more, and so may the difference of two configs.",
		s.loadWord(of.Low), s.loadWord(of.High), s.loadWord(of.Low), 100*(of.High/of.Low-1))
}
