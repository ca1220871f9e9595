package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"vllmtuner/render"
	"vllmtuner/studies/report"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/studyfile"
)

// item writes a line with its name in front, broken at the width of a terminal.
func (t *textLines) item(name, format string, args ...any) {
	const indent = "          "
	text := wrapped(indent+fmt.Sprintf(format, args...), indent)
	fmt.Fprintf(t, "%-*s%s", len(indent), name, text[len(indent):])
}

// writeText writes the tables of a sweep as its users wrote them, and what they cannot tell.
func (s *sweeping) writeText(w io.Writer) error {
	var t textLines
	s.writeHead(&t)
	s.writeConfigs(&t)
	if !s.measuredAny() {
		_, err := io.WriteString(w, t.String())
		return err
	}
	if s.closed() {
		s.writeLoops(&t)
	} else {
		for _, f := range gridFigures {
			s.grid(f.title, f.cell).writeTo(&t)
		}
		verdict := func(_ *sweptConfig, p trial.Probe) string { return verdictCell(p) }
		s.grid("SLO: "+s.File.SLO().String(), verdict).writeTo(&t)
	}
	s.writeStandings(&t)
	if !s.closed() {
		s.writeDetail(&t)
	}
	s.writeNotes(&t)
	t.WriteString("\nWhat these tables cannot tell\n")
	for _, text := range s.limits() {
		t.WriteString(wrapped("- "+text, "  "))
	}
	_, err := io.WriteString(w, t.String())
	return err
}

// writeHead says what is swept.
func (s *sweeping) writeHead(t *textLines) {
	load := "rate"
	if s.closed() {
		load = "concurrency"
	}
	by := strings.Join(s.File.Server.Command, " ")
	if name := s.File.Server.Simulate; name != "" {
		by = "simulated " + name
	}
	if s.File.Server.Simulate == "" && s.simulated() {
		by += " (simulated)"
	}
	t.item("sweep", "%s: %s x %s x %s, %s", s.File.Name, render.Count(len(s.configs), "config"), render.Count(len(s.sweep.Levels), load), render.Count(s.sweep.Requests, "request"), by)
	if args := s.File.Server.Args; len(args) > 0 {
		t.item("args", "%s for every config", strings.Join(args, " "))
	}
	t.item("workload", "%s, seed %d: the same requests in the same order at each load, all of them counted", s.Source.Name(), s.Seed)
	warm := "no warm-up"
	if s.sweep.WarmUp > 0 {
		warm = fmt.Sprintf("warm-up %d requests at %g req/s and %s", s.sweep.WarmUp, s.sweep.WarmUpRate, s.sweep.WarmUpCooldown)
	}
	cache := "carried from load to load"
	if s.setup.Cache == trial.Reset {
		cache = "emptied before each load"
	}
	t.item("cache", "%s; %s, then %s between loads", cache, warm, s.sweep.Cooldown)
	t.item("SLO", "%s", s.File.SLO())
}

// simulated reports whether a server was a simulated one, by the file or by its own log.
func (s *sweeping) simulated() bool {
	return s.File.Server.Simulate != "" || slices.ContainsFunc(s.configs, func(c sweptConfig) bool { return c.result.Facts.Simulated })
}

// writeConfigs says which flags each config has, and why one could not be measured.
func (s *sweeping) writeConfigs(t *textLines) {
	flags := make([]map[string]string, len(s.configs))
	names, longest := map[string]bool{}, len("config")
	for i, c := range s.configs {
		flags[i] = studyfile.ConfigFlags(c.Config)
		for name := range flags[i] {
			names[name] = true
		}
		longest = max(longest, len(s.label(i)))
	}
	short := report.ShortNames(slices.Collect(maps.Keys(names)))
	fmt.Fprintf(t, "\n%-*s  %6s  %s\n", longest, "config", "KV GiB", "flags")
	for i := range s.configs {
		c := &s.configs[i]
		words := make([]string, 0, len(flags[i]))
		for _, name := range slices.Sorted(maps.Keys(flags[i])) {
			words = append(words, short[name]+"="+flags[i][name])
		}
		kv := "-"
		if gib := c.result.Facts.KVCacheGiB; gib > 0 {
			kv = fmt.Sprintf("%.2f", gib)
		}
		indent := longest + 2 + 6 + 2
		text := brokenWords(cmp.Or(strings.Join(words, " "), "(none of its own)"), tableWidth-indent, strings.Repeat(" ", indent))
		fmt.Fprintf(t, "%-*s  %6s  %s\n", longest, s.label(i), kv, text)
		if trouble := c.trouble(); trouble != "" {
			t.WriteString(wrapped("    "+trouble, "      "))
		}
	}
	if len(short) > 0 {
		t.WriteString(report.Legend(short, tableWidth))
	}
}

// brokenWords breaks a text into lines of a width, and words that are longer too.
func brokenWords(text string, width int, indent string) string {
	lines := []string{""}
	for word := range strings.FieldsSeq(text) {
		for word != "" {
			last := &lines[len(lines)-1]
			switch room := width - len(*last) - 1; {
			case *last == "":
				n := min(len(word), width)
				*last, word = word[:n], word[n:]
			case len(word) <= room:
				*last, word = *last+" "+word, ""
			default:
				lines = append(lines, "")
			}
		}
	}
	return strings.Join(lines, "\n"+indent)
}

// label is a config's name; the baseline is marked.
func (s *sweeping) label(i int) string {
	if i == 0 {
		return s.configs[i].Name + " (baseline)"
	}
	return s.configs[i].Name
}

// grid is a table of loads by configs.
func (s *sweeping) grid(title string, cell func(*sweptConfig, trial.Probe) string) gridTable {
	g := gridTable{title: title, corner: "rate"}
	for _, level := range s.sweep.Levels {
		g.rows = append(g.rows, levelText(level))
	}
	for i := range s.configs {
		g.columns = append(g.columns, s.column(&s.configs[i], s.configs[i].Name, cell))
	}
	return g
}

// writeLoops writes a table over concurrencies for each config.
func (s *sweeping) writeLoops(t *textLines) {
	for i := range s.configs {
		c := &s.configs[i]
		g := gridTable{title: s.label(i) + " (latencies in ms)", corner: "conc"}
		for _, level := range s.sweep.Levels {
			g.rows = append(g.rows, levelText(level))
		}
		for _, f := range loopFigures {
			g.columns = append(g.columns, s.column(c, f.title, f.cell))
		}
		g.columns = append(g.columns, s.column(c, "SLO", func(_ *sweptConfig, p trial.Probe) string { return verdictCell(p) }))
		g.writeTo(t)
	}
}

// column is one figure of a config at each load.
func (s *sweeping) column(c *sweptConfig, head string, cell func(*sweptConfig, trial.Probe) string) gridColumn {
	column := gridColumn{head: head}
	for _, level := range s.sweep.Levels {
		text := "-"
		if p, ok := c.at(level); ok {
			text = cell(c, p)
		}
		column.cells = append(column.cells, text)
	}
	return column
}

// A standing is how a config compares.
type standing struct {
	highest capacity.Capacity
	below   []float64 // loads under the highest that failed
	versus  string    // against the baseline, such as +25 %; "-" when one of them has no highest load
	word    string    // winner or tie; "" for the others
}

// standings compares the configs. A winner is better than every other, the baseline among them. Nothing is said over a config whose highest
// load the load generator decided, and none wins whom such a one may reach.
func (s *sweeping) standings() []standing {
	all, found := make([]standing, len(s.configs)), make([]capacity.Capacity, len(s.configs))
	for i := range s.configs {
		found[i] = s.configs[i].highest()
		all[i] = standing{highest: found[i], below: s.configs[i].below(), versus: "-"}
		if i > 0 && found[i].Met() && found[0].Met() && found[i].Limited == "" && found[0].Limited == "" {
			all[i].versus = render.Percent(found[i].Rate/found[0].Rate - 1)
		}
	}
	best := capacity.Best(found)
	if s.rival(found, best) >= 0 {
		return all
	}
	for _, i := range best {
		switch {
		case len(best) > 1:
			all[i].word = "tie"
		case i > 0:
			all[i].word = "winner"
		}
	}
	return all
}

// rival is a config that may reach the best ones, for all that a late load generator could show of it; -1 where there is none.
func (s *sweeping) rival(found []capacity.Capacity, best []int) int {
	return slices.IndexFunc(found, func(c capacity.Capacity) bool {
		if c.Limited == "" || len(best) == 1 && c.Rate == found[best[0]].Rate {
			return false
		}
		return slices.ContainsFunc(s.sweep.Levels, func(l trial.Level) bool {
			return (c.High == 0 || l.Load() < c.High) && (len(best) == 0 || l.Load() >= found[best[0]].Rate)
		})
	})
}

// writeStandings names the highest load of each config within the SLO.
func (s *sweeping) writeStandings(t *textLines) {
	longest := len("config")
	for i := range s.configs {
		longest = max(longest, len(s.label(i)))
	}
	what := "rate"
	if s.closed() {
		what = "concurrency"
	}
	fmt.Fprintf(t, "\nHighest %s within the SLO\n%-*s %11s %8s %7s  %s\n", what, longest, "config", what, "vs base", "", "next on the grid")
	for i, st := range s.standings() {
		rate := "none"
		switch {
		case st.highest.Met():
			rate = s.loadWord(st.highest.Rate)
		case st.highest.Bound == "":
			rate = "-"
		}
		fmt.Fprintf(t, "%-*s %11s %8s %7s  %s\n", longest, s.label(i), rate, st.versus, strings.ToUpper(st.word), s.next(&s.configs[i], st.highest))
		if len(st.below) > 0 {
			var words []string
			for _, load := range st.below {
				words = append(words, s.loadWord(load))
			}
			t.WriteString(wrapped(fmt.Sprintf("    not monotone: it failed at %s, below its highest", strings.Join(words, ", ")), "      "))
		}
	}
	if text := s.conclusion(); text != "" {
		t.WriteString(wrapped(text, ""))
	}
	if text := s.ranking(); text != "" {
		t.WriteString(wrapped(text, "  "))
	}
}

// ranking orders the configs of a closed loop by the requests per second that each completed at the highest concurrency that all of
// them were measured at; "" where there is nothing to order.
func (s *sweeping) ranking() string {
	if !s.closed() {
		return ""
	}
	type place struct {
		name string
		trial.Probe
	}
	var level trial.Level
	var places []place
	for _, l := range s.sweep.Levels {
		var there []place
		for i := range s.configs {
			if p, ok := s.configs[i].at(l); ok {
				there = append(there, place{s.configs[i].Name, p})
			}
		}
		if len(there) > 1 && len(there) >= len(places) { // one that died on the way is ordered where it lived
			level, places = l, there
		}
	}
	if len(places) == 0 {
		return ""
	}
	slices.SortStableFunc(places, func(a, b place) int {
		return cmp.Compare(b.Measurement.RequestThroughput, a.Measurement.RequestThroughput)
	})
	first := places[0].Measurement.RequestThroughput
	words := make([]string, len(places))
	for i, p := range places {
		words[i] = fmt.Sprintf("%s %.3g", p.name, p.Measurement.RequestThroughput)
		if less := 100 * (1 - p.Measurement.RequestThroughput/first); i > 0 && first > 0 {
			words[i] += " (" + strings.Replace(fmt.Sprintf("%+.0f %%", -less), "-0 ", "0 ", 1) + ")"
		}
		if !p.Verdict.Pass || p.Verdict.ClientLimited != "" {
			words[i] += " " + verdictCell(p.Probe)
		}
	}
	return fmt.Sprintf("Ranking at %s, by requests per second: %s.", level, strings.Join(words, ", "))
}

func (s *sweeping) loadWord(load float64) string {
	if s.closed() {
		return fmt.Sprintf("%g", load)
	}
	return rateText(load)
}

// next says what came of the load above the highest.
func (s *sweeping) next(c *sweptConfig, h capacity.Capacity) string {
	i := slices.IndexFunc(s.sweep.Levels, func(l trial.Level) bool { return l.Load() == h.High })
	switch {
	case h.Limited != "":
		return "client-limited"
	case h.Bound == "":
		return "not measured"
	case i < 0 && len(c.probes) < len(s.sweep.Levels):
		return "not measured"
	case i < 0:
		return "none: the grid ends here"
	}
	p, _ := c.at(s.sweep.Levels[i])
	return s.loadWord(h.High) + " " + verdictCell(p)
}

// conclusion says in a sentence who won.
func (s *sweeping) conclusion() string {
	all := s.standings()
	winner := slices.IndexFunc(all, func(st standing) bool { return st.word == "winner" })
	tied, best := 0, ""
	for _, st := range all {
		if st.word == "tie" {
			tied++
			best = loadText(st.highest.Rate, s.closed())
		}
	}
	found := make([]capacity.Capacity, len(all))
	for i, st := range all {
		found[i] = st.highest
	}
	if i := s.rival(found, capacity.Best(found)); i >= 0 {
		return fmt.Sprintf("No winner can be named: the load generator was late for %s, and how far it reaches is not known; %s.", s.configs[i].Name, moreCores)
	}
	switch {
	case winner > 0 && all[0].highest.Limited != "":
		return fmt.Sprintf("%s alone reaches %s.", s.configs[winner].Name, loadText(all[winner].highest.Rate, s.closed()))
	case winner > 0 && all[winner].versus == "-" && all[0].highest.Met():
		return fmt.Sprintf("%s is above the baseline on this grid, and how far is not known: the load generator was late.", s.configs[winner].Name)
	case winner > 0 && !all[0].highest.Met():
		return fmt.Sprintf("%s alone reaches %s; the baseline kept the SLO nowhere.", s.configs[winner].Name, loadText(all[winner].highest.Rate, s.closed()))
	case winner > 0:
		return fmt.Sprintf("%s is %s above the baseline on this grid; one draw does not prove it better.", s.configs[winner].Name, strings.TrimPrefix(all[winner].versus, "+"))
	case tied > 0 && all[0].word == "tie":
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

// detailLevel is the level of the detail table: the baseline's highest, or the lowest where it kept the SLO nowhere.
func (s *sweeping) detailLevel() (level trial.Level, why string) {
	highest := s.configs[0].highest()
	for _, l := range s.sweep.Levels {
		if highest.Met() && l.Load() == highest.Rate {
			return l, "the baseline's highest rate"
		}
	}
	if highest.Limited != "" {
		return s.sweep.Levels[0], "the lowest rate; the load generator was late for the baseline"
	}
	return s.sweep.Levels[0], "the lowest rate; the baseline kept the SLO nowhere"
}

func (s *sweeping) writeDetail(t *textLines) {
	level, why := s.detailLevel()
	g := gridTable{title: fmt.Sprintf("At %s, %s", loadText(level.Load(), false), why), corner: ""}
	for _, f := range detailFigures {
		g.rows = append(g.rows, f.title)
	}
	for i := range s.configs {
		c := &s.configs[i]
		column := gridColumn{head: c.Name}
		p, ok := c.at(level)
		for _, f := range detailFigures {
			text := "-"
			if ok {
				text = f.cell(c, p)
			}
			column.cells = append(column.cells, text)
		}
		g.columns = append(g.columns, column)
	}
	g.writeTo(t)
}

// writeNotes says what a reader must know of single figures, and of all.
func (s *sweeping) writeNotes(t *textLines) {
	var notes []string
	if s.simulated() {
		notes = append(notes, "simulated: no GPU is behind these figures")
	}
	for i := range s.configs {
		c := &s.configs[i]
		for _, note := range c.result.Notes {
			if i > 0 && slices.Contains(s.Marks(), note) {
				continue
			}
			notes = append(notes, note)
		}
		for _, p := range c.probes {
			if p.Note != "" {
				notes = append(notes, fmt.Sprintf("%s at %s: %s", c.Name, p.Level(), p.Note))
			}
		}
	}
	if len(notes) > 0 {
		t.WriteString("\n")
	}
	for _, note := range notes {
		t.WriteString(wrapped("note: "+note, "  "))
	}
}

// limits says what tables like these cannot tell, with this sweep's own figures.
func (s *sweeping) limits() []string {
	all, texts := s.standings(), []string{}
	if text := s.gridLimit(all); text != "" {
		texts = append(texts, text)
	}
	tied := 0
	for _, st := range all {
		if st.word == "tie" {
			tied++
		}
	}
	if tied > 1 {
		texts = append(texts, fmt.Sprintf("Ties: %d of %d configs share the highest load, and the grid does not order them.", tied, len(all)))
	}
	texts = append(texts, s.drawLimit())
	if s.setup.Cache == trial.Carried {
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

// drawLimit says how few requests the highest percentile of the SLO hangs on.
func (s *sweeping) drawLimit() string {
	highest := slices.MaxFunc(s.File.Limits, func(a, b slo.Limit) int { return cmp.Compare(a.Percentile, b.Percentile) })
	slow := max(1, int(math.Round((100-highest.Percentile)/100*float64(s.sweep.Requests))))
	slowest := fmt.Sprintf("the %d slowest", slow)
	if slow == 1 {
		slowest = "a single one"
	}
	return fmt.Sprintf("One draw: the p%g of %s hangs on %s. Another seed asks other requests at other times, and near a limit its verdicts are others.",
		highest.Percentile, render.Count(s.sweep.Requests, "request"), slowest)
}

// gridLimit says between which loads nothing is known of the best.
func (s *sweeping) gridLimit(all []standing) string {
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
