package sweep

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
)

// A standing is how a config compares with the others.
type standing struct {
	highest capacity.Capacity
	below   []float64 // loads under the highest that failed
	gain    float64   // its highest load against the baseline's: 0.25 is 25 % more
	known   bool      // gain is known
	mark    string    // winner or tie; "" for the others
}

// versus is the gain for people, such as +25 %.
func (s standing) versus() string {
	if !s.known {
		return "-"
	}
	return render.Percent(s.gain)
}

// standings compares the configs. A winner is better than all other configs, the baseline included. It does not compare a config
// whose highest load the load generator hid. There is no winner if such a config might reach the winner's load.
func (s *Sweep) standings() []standing {
	all, found := make([]standing, len(s.Configs)), make([]capacity.Capacity, len(s.Configs))
	for i := range s.Configs {
		found[i] = s.Configs[i].highest()
		all[i] = standing{highest: found[i], below: s.Configs[i].below()}
		if i > 0 && found[i].Met() && found[0].Met() && found[i].Limited == "" && found[0].Limited == "" {
			all[i].gain, all[i].known = found[i].Rate/found[0].Rate-1, true
		}
	}
	best := capacity.Best(found)
	if s.rival(found, best) >= 0 {
		return all
	}
	for _, i := range best {
		switch {
		case len(best) > 1:
			all[i].mark = "tie"
		case i > 0:
			all[i].mark = "winner"
		}
	}
	return all
}

// rival returns the index of a config that might reach the best configs, because a late load generator hid its highest load. It
// returns -1 if there is none.
func (s *Sweep) rival(found []capacity.Capacity, best []int) int {
	return slices.IndexFunc(found, func(c capacity.Capacity) bool {
		if c.Limited == "" || len(best) == 1 && c.Rate == found[best[0]].Rate {
			return false
		}
		return slices.ContainsFunc(s.Plan.Levels, func(l trial.Level) bool {
			return (c.High == 0 || l.Load() < c.High) && (len(best) == 0 || l.Load() >= found[best[0]].Rate)
		})
	})
}

// conclusion says in a sentence which config won.
func (s *Sweep) conclusion() string {
	all := s.standings()
	winner := slices.IndexFunc(all, func(st standing) bool { return st.mark == "winner" })
	tied, best := 0, ""
	for _, st := range all {
		if st.mark == "tie" {
			tied++
			best = loadtest.LoadText(st.highest.Rate, s.closed())
		}
	}
	found := make([]capacity.Capacity, len(all))
	for i, st := range all {
		found[i] = st.highest
	}
	if i := s.rival(found, capacity.Best(found)); i >= 0 {
		return fmt.Sprintf("No winner can be named: the load generator was late for %s, so its highest load is not known; %s.", s.Configs[i].Name, loadtest.MoreCores)
	}
	switch {
	case winner > 0 && all[0].highest.Limited != "":
		return fmt.Sprintf("%s alone reaches %s.", s.Configs[winner].Name, loadtest.LoadText(all[winner].highest.Rate, s.closed()))
	case winner > 0 && !all[winner].known && all[0].highest.Met():
		return fmt.Sprintf("%s is above the baseline on this grid, but by how much is not known: the load generator was late.", s.Configs[winner].Name)
	case winner > 0 && !all[0].highest.Met():
		return fmt.Sprintf("%s alone reaches %s; the baseline kept the SLO nowhere.", s.Configs[winner].Name, loadtest.LoadText(all[winner].highest.Rate, s.closed()))
	case winner > 0:
		return fmt.Sprintf("%s is %s above the baseline on this grid; one draw does not prove it better.", s.Configs[winner].Name, strings.TrimPrefix(all[winner].versus(), "+"))
	case tied > 0 && all[0].mark == "tie":
		return fmt.Sprintf("%d of %d configs tie at %s, the baseline among them: none improved on it.", tied, len(all), best)
	case tied > 0:
		return fmt.Sprintf("%d of %d configs tie at %s: this grid names no winner.", tied, len(all), best)
	case all[0].highest.Met() && slices.ContainsFunc(all[1:], func(st standing) bool { return st.highest.Bound != "" }):
		return "No config reaches the baseline."
	case all[0].highest.Met():
		return ""
	}
	return "No config kept the SLO at any load."
}

// ranking orders the configs of a closed loop by their requests per second at the highest concurrency at which all of them were
// measured; "" where there is nothing to order.
func (s *Sweep) ranking() string {
	if !s.closed() {
		return ""
	}
	type entry struct {
		name string
		trial.Probe
	}
	var level trial.Level
	var entries []entry
	for _, l := range s.Plan.Levels {
		var there []entry
		for i := range s.Configs {
			if p, ok := s.Configs[i].at(l); ok {
				there = append(there, entry{s.Configs[i].Name, p})
			}
		}
		if len(there) > 1 && len(there) >= len(entries) { // a config that died at a higher level is ranked at this one
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
		texts[i] = fmt.Sprintf("%s %.3g", p.name, p.Measurement.RequestThroughput)
		if i > 0 && first > 0 {
			texts[i] += " (" + render.Percent(p.Measurement.RequestThroughput/first-1) + ")"
		}
		if !p.Verdict.Pass || p.Verdict.ClientLimited != "" {
			texts[i] += " " + verdictCell(p.Probe)
		}
	}
	return fmt.Sprintf("Ranking at %s, by requests per second: %s.", level, strings.Join(texts, ", "))
}
