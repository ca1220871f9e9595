package sweep

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
)

// WriteText writes the tables that sweeps made by hand have, and what these tables cannot show.
func (s Report) WriteText(w io.Writer) error {
	t := render.Text{Width: render.Columns(w)}
	s.writeHead(&t)
	s.writeConfigs(&t)
	if !s.measuredAny() {
		return t.Flush(w)
	}
	if s.closed() {
		for i, c := range s.Configs {
			t.Table(s.label(i)+" (latencies in ms)", s.loopTable(c).table())
		}
	} else {
		for _, f := range gridFigures {
			t.Table(f.title(), s.byConfig("rate", f.people).table())
		}
		t.Table("SLO: "+s.SLO.String(), s.byConfig("rate", verdictCell).table())
	}
	s.writeHighestLoads(&t)
	if !s.closed() {
		level, why := s.detailLevel()
		t.Table(fmt.Sprintf("At %s, %s", loadtest.LoadText(level.Load(), false), why), s.detail("", level, figure.people).table())
	}
	s.writeNotes(&t)
	t.WriteString("\nWhat these tables cannot tell\n")
	for _, text := range s.limits() {
		t.Paragraph("- "+text, "  ")
	}
	return t.Flush(w)
}

// WritePlan says what the sweep will do, and how long it will take.
func (s *Sweep) WritePlan(w io.Writer) error {
	t := render.Text{Width: render.Columns(w)}
	s.writeHead(&t)
	s.writeConfigs(&t)
	each := s.StartUp + s.Plan.Planned()
	all := each * time.Duration(len(s.Configs))
	t.WriteString("\n")
	switch {
	case s.loads().closed():
		t.Paragraph(fmt.Sprintf("plan: %s, a start of about %s each, then %s at each of %s; the server decides how long these take",
			render.Count(len(s.Configs), "config"), render.Span(s.StartUp), render.Count(s.Plan.Requests, "request"), render.Count(len(s.Plan.Levels), "concurrency")), "  ")
	default:
		t.Paragraph(fmt.Sprintf("plan: %s, about %s each and %s in all", render.Count(len(s.Configs), "config"), render.Span(each), render.Span(all)), "  ")
	}
	if s.Simulated != "" {
		t.WriteString("simulated: all of it in seconds\n")
	}
	return t.Flush(w)
}

// writeHead writes what is measured, and how.
func (s *Sweep) writeHead(t *render.Text) {
	by := strings.Join(s.Command, " ")
	if name := s.Simulated; name != "" {
		by = "simulated " + name
	}
	if s.Simulated == "" && s.simulated() {
		by += " (simulated)"
	}
	t.Item("sweep", "%s: %s × %s × %s, %s", s.Name, render.Count(len(s.Configs), "config"), render.Count(len(s.Plan.Levels), s.loads().varied()), render.Count(s.Plan.Requests, "request"), by)
	if args := s.Args; len(args) > 0 {
		t.Item("args", "%s for every config", strings.Join(args, " "))
	}
	t.Item("workload", "%s, seed %d: the same requests in the same order at each load, all of them counted", s.Workload, s.Seed)
	warm := "no warm-up"
	if s.Plan.WarmUp > 0 {
		warm = fmt.Sprintf("warm-up %s at %g req/s and %s", render.Count(s.Plan.WarmUp, "request"), s.Plan.WarmUpRate, render.Took(s.Plan.WarmUpCooldown))
	}
	cache := "carried from load to load"
	if s.Cache == trial.Reset {
		cache = "emptied before each load"
	}
	t.Item("cache", "%s; %s, then %s between loads", cache, warm, render.Took(s.Plan.Cooldown))
	t.Item("SLO", "%s", s.SLO)
}

// writeConfigs writes the flags of each config, and why its server failed if it did.
func (s *Sweep) writeConfigs(t *render.Text) {
	short := render.ShortNames(s.flagNames())
	table := render.Table{Columns: []render.Column{{Head: "config"}, {Head: "KV GiB", Right: true}, {Head: "flags", Wraps: true, ShrinkTo: 20}}}
	for i, c := range s.Configs {
		flags := make([]string, 0, len(c.Flags))
		for _, name := range slices.Sorted(maps.Keys(c.Flags)) {
			flags = append(flags, short[name]+"="+c.Flags[name])
		}
		table.Rows = append(table.Rows, []string{s.label(i), cmp.Or(c.kvCache(), "-"), cmp.Or(strings.Join(flags, " "), "(none of its own)")})
		table.Under = append(table.Under, c.trouble())
	}
	t.Table("", table)
	if len(short) > 0 {
		t.WriteString(render.Legend(short, t.Columns()))
	}
}

// writeNotes writes the notes about the figures. It writes the notes in Marks once, because they hold for all configs.
func (s *Sweep) writeNotes(t *render.Text) {
	var notes []string
	if s.simulated() {
		notes = append(notes, "simulated: no GPU is behind these figures")
	}
	for i, c := range s.Configs {
		for _, note := range c.Result.Notes {
			if i > 0 && slices.Contains(s.Marks, note) {
				continue
			}
			notes = append(notes, note)
		}
		for _, p := range c.Probes {
			if p.Note != "" {
				notes = append(notes, fmt.Sprintf("%s at %s: %s", c.Name, p.Level(), p.Note))
			}
		}
	}
	if len(notes) > 0 {
		t.WriteString("\n")
	}
	for _, note := range notes {
		t.Paragraph("note: "+note, "  ")
	}
}

// writeHighestLoads writes the highest load at which each config kept the SLO.
func (c comparison) writeHighestLoads(t *render.Text) {
	table := render.Table{Columns: []render.Column{
		{Head: "config"}, {Head: c.varied(), Right: true}, {Head: "vs base", Right: true}, {}, {Head: "next on the grid", Wraps: true, ShrinkTo: 16},
	}}
	for i, st := range c.all {
		rate := "none"
		switch {
		case st.Met():
			rate = c.loadWord(st.Rate)
		case st.Bound == "":
			rate = "-"
		}
		table.Rows = append(table.Rows, []string{c.label(i), rate, st.versus(), strings.ToUpper(st.mark), c.next(c.Configs[i], st.Capacity)})
		below := ""
		if len(st.below) > 0 {
			loads := lo.Map(st.below, func(load float64, _ int) string { return c.loadWord(load) })
			below = fmt.Sprintf("not monotone: it failed at %s, below its highest passed load", strings.Join(loads, ", "))
		}
		table.Under = append(table.Under, below)
	}
	t.Table(fmt.Sprintf("Highest %s within the SLO", c.varied()), table)
	if text := c.conclusion(); text != "" {
		t.Paragraph(text, "")
	}
	if text := c.ranking(); text != "" {
		t.Paragraph(text, "  ")
	}
}

// detailLevel returns the level of the detail table: the highest at which the baseline kept the SLO, or the first level
// if there is none.
func (c comparison) detailLevel() (level trial.Level, why string) {
	base := c.all[0]
	for _, l := range c.Plan.Levels {
		if base.Met() && l.Load() == base.Rate {
			return l, "the baseline's highest rate"
		}
	}
	if base.Limited != "" {
		return c.Plan.Levels[0], "the lowest rate; the load generator was late for the baseline"
	}
	return c.Plan.Levels[0], "the lowest rate; the baseline kept the SLO at no load"
}
