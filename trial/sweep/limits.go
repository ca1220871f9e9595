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
	c, texts := s.compare(), []string{}
	if text := s.gridLimit(c.all); text != "" {
		texts = append(texts, text)
	}
	if len(c.best) > 1 && c.rival < 0 {
		texts = append(texts, fmt.Sprintf("Ties: %d of %d configs share the highest load, and the grid does not order them.", len(c.best), len(c.all)))
	}
	texts = append(texts, s.drawLimit())
	if s.Cache == trial.Carried {
		texts = append(texts, "The cache: each load finds the prompts of earlier loads in the prefix cache, so another order or another first load gives other figures.")
	} else {
		texts = append(texts, "The cache: each load begins with an empty prefix cache, as no server in production does.")
	}
	if s.closed() {
		texts = append(texts, "The closed loop: each request waits until an earlier one ends, so no server is asked for more than it can do. That ranks configs cheaply, but measures no capacity. The order misleads where more streams bring no more requests per second, and where TPOT breaks first.")
	} else {
		texts = append(texts, "The end: no load follows the last requests. They see an emptying server, so the figures are too good where answers are long.")
	}
	return append(texts, "`tuner run` searches the flags, and rates between those of the grid. Its windows last long enough for a p99, with load before and after them.")
}

// drawLimit says how few requests decide the highest percentile of the SLO.
func (s *Sweep) drawLimit() string {
	highest := slices.MaxFunc(s.SLO.Limits, func(a, b slo.Limit) int { return cmp.Compare(a.Percentile, b.Percentile) })
	slow := max(1, int(math.Round((100-highest.Percentile)/100*float64(s.Plan.Requests))))
	slowest := fmt.Sprintf("the %d slowest of %s decide", slow, render.Count(s.Plan.Requests, "request"))
	if slow == 1 {
		slowest = fmt.Sprintf("the slowest of %s decides", render.Count(s.Plan.Requests, "request"))
	}
	return fmt.Sprintf("One draw: %s the p%g. Another seed sends other requests at other times, and near a limit its verdicts may differ.", slowest, highest.Percentile)
}

// gridLimit says between which two loads the true highest load of the best config lies; "" where no config has one.
func (s *Sweep) gridLimit(all []standing) string {
	var best standing
	for _, st := range all {
		if st.Bound == capacity.Exact && st.Rate > best.Rate {
			best = st
		}
	}
	if best.Rate == 0 {
		return ""
	}
	return fmt.Sprintf("The grid: nothing was measured between %s and %s. A highest load of %s may really be up to %.0f %% higher, and the difference between two configs may be off by as much.",
		s.loadWord(best.Low), s.loadWord(best.High), s.loadWord(best.Low), 100*(best.High/best.Low-1))
}
