package sweep

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
	"vllmtuner/trial/slo"
)

// A configResult compares the highest load of one config with the highest loads of the baseline and of the other
// configs. Its capacity is the highest measured load that kept the SLO.
type configResult struct {
	capacity.Capacity
	below []float64 // failed loads that are lower than the highest passed one
	gain  float64   // its highest load relative to the baseline's: 0.25 means 25 % more
	known bool      // whether the gain is known
	mark  string    // "winner", "tie" or ""
}

// versus returns the gain as text, such as "+25 %"; "-" if the gain is not known.
func (r configResult) versus() string {
	if !r.known {
		return "-"
	}
	return render.Percent(r.gain)
}

// A comparison is a sweep with the result of each config, in the order of the configs.
type comparison struct {
	*Sweep
	loads
	all   []configResult
	best  []int // indexes of the configs with the highest load; more than one is a tie
	rival int   // index of a config that may be the best, but had a late load generator; -1 means none
}

// compare compares the configs. A winner has a higher load than all other configs, the baseline included. If the load
// generator was late, the highest load of a config is not known. Such a config gets no gain. If it might reach the
// winner's load, there is no winner.
func (s *Sweep) compare() comparison {
	c := comparison{Sweep: s, loads: s.loads(), all: make([]configResult, len(s.Configs))}
	top := 0.0
	for i := range c.all {
		r, base := &c.all[i], &c.all[0]
		r.Capacity, r.below = capacity.Highest(trial.Steps(s.Configs[i].Probes))
		if r.Met() {
			top = max(top, r.Rate)
		}
		if i > 0 && r.Met() && base.Met() && r.Limited == "" && base.Limited == "" {
			r.gain, r.known = r.Rate/base.Rate-1, true
		}
	}
	for i, r := range c.all {
		if r.Met() && r.Rate == top {
			c.best = append(c.best, i)
		}
	}
	c.rival = slices.IndexFunc(c.all, func(r configResult) bool {
		if r.Limited == "" || len(c.best) == 1 && r.Rate == top {
			return false
		}
		return slices.ContainsFunc(s.Plan.Levels, func(l trial.Level) bool {
			return (r.High == 0 || l.Load() < r.High) && l.Load() >= top
		})
	})
	for _, i := range c.best {
		switch {
		case c.rival >= 0:
		case len(c.best) > 1:
			c.all[i].mark = "tie"
		case i > 0:
			c.all[i].mark = "winner"
		}
	}
	return c
}

// conclusion says in a sentence which config won.
func (c comparison) conclusion() string {
	best := func() string { return loadtest.LoadText(c.all[c.best[0]].Rate, c.closed()) }
	switch {
	case c.rival >= 0:
		return fmt.Sprintf("No winner can be named: the load generator was late for %s, so its highest load is not known; %s.", c.Configs[c.rival].Name, loadtest.MoreCores)
	case len(c.best) == 0:
		return "No config kept the SLO at any load."
	case len(c.best) > 1 && c.best[0] == 0:
		return fmt.Sprintf("%d of %d configs tie at %s, the baseline among them: none improved on it.", len(c.best), len(c.all), best())
	case len(c.best) > 1:
		return fmt.Sprintf("%d of %d configs tie at %s: this grid names no winner.", len(c.best), len(c.all), best())
	case c.best[0] == 0 && slices.ContainsFunc(c.all[1:], func(r configResult) bool { return r.Bound != "" }):
		return "No config reaches the baseline."
	case c.best[0] == 0:
		return ""
	}
	winner, base := c.all[c.best[0]], c.all[0]
	name := c.Configs[c.best[0]].Name
	switch {
	case base.Limited != "":
		return fmt.Sprintf("%s alone reaches %s.", name, best())
	case !base.Met():
		return fmt.Sprintf("%s alone reaches %s; the baseline kept the SLO at no load.", name, best())
	case !winner.known:
		return fmt.Sprintf("%s is above the baseline on this grid, but by how much is not known: the load generator was late.", name)
	}
	return fmt.Sprintf("%s is %s above the baseline on this grid; one draw does not prove it better.", name, render.Share(winner.gain))
}

// ranking orders the configs of a closed loop by requests per second. It compares them at the concurrency at which the
// most configs were measured. If there are several such concurrencies, it takes the highest. It returns "" for an open
// loop, and if no two configs can be compared.
func (c comparison) ranking() string {
	if !c.closed() {
		return ""
	}
	type entry struct {
		name string
		trial.Probe
	}
	var level trial.Level
	var entries []entry
	for _, l := range c.loads {
		var there []entry
		for _, one := range c.Configs {
			if p, ok := one.at(l); ok {
				there = append(there, entry{one.Name, p})
			}
		}
		if len(there) > 1 && len(there) >= len(entries) { // a config whose server died at a higher level is still ranked
			level, entries = l, there
		}
	}
	if len(entries) == 0 {
		return ""
	}
	slices.SortStableFunc(entries, func(a, b entry) int {
		return cmp.Compare(b.Measurement.RequestThroughput, a.Measurement.RequestThroughput)
	})
	first := entries[0].Measurement.RequestThroughput
	texts := make([]string, len(entries))
	for i, p := range entries {
		texts[i] = fmt.Sprintf("%s %s req/s", p.name, render.Number(p.Measurement.RequestThroughput))
		if i > 0 && first > 0 {
			texts[i] += " (" + render.Percent(p.Measurement.RequestThroughput/first-1) + ")"
		}
		if !p.Verdict.Pass || p.Verdict.ClientLimited != "" {
			texts[i] += ", " + verdictCell(nil, p.Probe)
		}
	}
	return fmt.Sprintf("Ranking at %s: %s.", level, strings.Join(texts, "; "))
}

// limits returns sentences about what the tables of this sweep cannot show.
func (c comparison) limits() []string {
	texts := []string{}
	if text := c.gridLimit(); text != "" {
		texts = append(texts, text)
	}
	if len(c.best) > 1 && c.rival < 0 {
		texts = append(texts, fmt.Sprintf("Ties: %d of %d configs share the highest load, and the grid does not order them.", len(c.best), len(c.all)))
	}
	texts = append(texts, c.drawLimit())
	if c.Cache == trial.Carried {
		texts = append(texts, "The cache: each load finds the prompts of earlier loads in the prefix cache, so another order or another first load gives other figures.")
	} else {
		texts = append(texts, "The cache: each load begins with an empty prefix cache, as no server in production does.")
	}
	if c.closed() {
		texts = append(texts, "The closed loop: each request waits until an earlier one ends, so no server is asked for more than it can do. That ranks configs cheaply, but measures no capacity. The order misleads where more streams bring no more requests per second, and where TPOT breaks first.")
	} else {
		texts = append(texts, "The end: no load follows the last requests. They see an emptying server, so the figures are too good where answers are long.")
	}
	return append(texts, "`tuner run` searches the flags, and also measures rates between the rates of the grid. Its windows last long enough for a p99, with load before and after them.")
}

// drawLimit says how few requests decide the highest percentile in the SLO.
func (c comparison) drawLimit() string {
	highest := slices.MaxFunc(c.SLO.Limits, func(a, b slo.Limit) int { return cmp.Compare(a.Percentile, b.Percentile) })
	slow := max(1, int(math.Round((100-highest.Percentile)/100*float64(c.Plan.Requests))))
	slowest := fmt.Sprintf("the %d slowest of %s decide", slow, render.Count(c.Plan.Requests, "request"))
	if slow == 1 {
		slowest = fmt.Sprintf("the slowest of %s decides", render.Count(c.Plan.Requests, "request"))
	}
	return fmt.Sprintf("One random seed: %s the p%g. Another seed sends other requests at other times, so a verdict near a limit may differ.", slowest, highest.Percentile)
}

// gridLimit says that the true highest load of the best config lies between two measured loads, and names them. It
// returns "" if no config has both a passed load and a failed load above it.
func (c comparison) gridLimit() string {
	var best configResult
	for _, r := range c.all {
		if r.Bound == capacity.Exact && r.Rate > best.Rate {
			best = r
		}
	}
	if best.Rate == 0 {
		return ""
	}
	return fmt.Sprintf("The grid: nothing was measured between %s and %s. A highest load of %s may really be up to %.0f %% higher, and the difference between two configs may be off by as much.",
		c.loadWord(best.Low), c.loadWord(best.High), c.loadWord(best.Low), 100*(best.High/best.Low-1))
}
