package calibrate

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"strings"

	"vllmtuner/render"
)

func joined(names []string) string { return strings.Join(names, ", ") }

// WriteText writes the result as text.
func (r *Result) WriteText(w io.Writer) error {
	b := render.Text{Width: render.Columns(w)}
	r.writeUse(&b)
	r.writeErrors(&b)
	r.writeConstants(&b)
	for _, note := range r.Notes {
		b.Item("note", "%s", note)
	}
	return b.Flush(w)
}

// writeUse writes which trials and probes were used, and how the fit went.
func (r *Result) writeUse(b *render.Text) {
	text := fmt.Sprintf("%s, %s; from %s", r.Study, render.Of(r.UsedTrials, r.Trials, "trial"), r.From)
	if r.Simulated {
		text += ". The study measured a simulated server, so the profile describes a simulation and no GPU"
	}
	b.Item("study", "%s", text)
	text = fmt.Sprintf("%d fitted, %d held out, of %d", r.Fitted, r.HeldOut, r.Probes)
	for _, left := range r.LeftOut {
		text += fmt.Sprintf("; left out: %d %s", left.N, left.Why)
	}
	b.Item("probes", "%s", text)
	for _, left := range r.LeftOutTrials {
		b.Item("", "%s", render.Count(left.N, "trial")+" left out: "+left.Why)
	}
	if r.Memory.N > 0 {
		text = fmt.Sprintf("of %s, %d of them refused: error %.3f GiB, before %.3g (root mean square)", render.Count(r.Memory.N, "start"), r.Memory.Refused, r.Memory.After, r.Memory.Before)
		b.Item("KV cache", "%s", text)
	}
	if r.HitRate >= 0 {
		b.Item("hit rate", "of the prefix cache: median error %.1f points; not fitted", 100*r.HitRate)
	}
	text = fmt.Sprintf("%s of all probes in %s", render.Count(r.Replays, "replay"), render.Took(r.Took))
	switch {
	case r.TimeUp:
		text += "; ended by the time limit: a longer --time-limit may reduce the errors"
	case !r.Converged:
		text += "; not converged: calibrate again with --from this profile"
	}
	b.Item("fit", "%s", text)
}

// writeErrors writes the errors of the predictions.
func (r *Result) writeErrors(b *render.Text) {
	table := render.Table{Gap: 1, Columns: []render.Column{{Head: "error, %"}}}
	for _, group := range []string{"before", "after, fitted", "after, held out"} {
		for _, head := range []string{"median", "p90", "max"} {
			table.Columns = append(table.Columns, render.Column{Group: group, Head: head, Right: true, MinWidth: len("median")})
		}
	}
	for _, m := range r.Metrics {
		row := []string{m.Metric}
		for _, s := range []Spread{m.Before, m.After, m.HeldOut} {
			for _, v := range []float64{s.Median, s.P90, s.Max} {
				text := "-"
				if s.N > 0 {
					text = formatError(100 * v)
				}
				row = append(row, text)
			}
		}
		table.Rows = append(table.Rows, row)
	}
	b.Table("", table)
}

// formatConstant formats a constant with four digits, or as a whole number if it is 1,000 or more.
func formatConstant(v float64) string {
	if v >= 1000 && v < 1e9 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.4g", v)
}

// formatError formats an error in per cent, in at most six columns. Below 100 it has one decimal.
func formatError(v float64) string {
	switch {
	case math.IsInf(v, 0) || v >= 1e5:
		return ">99999"
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

// writeConstants writes the known constants as a table. Then it writes the other constants, and why they are not known.
func (r *Result) writeConstants(b *render.Text) {
	table := render.Table{Columns: []render.Column{
		{Head: "constant", Alone: true, ShrinkTo: 30}, {Head: "before →", Right: true}, {Head: "after", Right: true}, {Head: "unit"}, {Head: "error"},
	}}
	var unseen []string
	for _, c := range r.Changes {
		switch c.Certainty {
		case Known, Together:
			text := ""
			switch {
			case c.Certainty == Together:
				text = "see below"
			case c.Error > 0:
				text = render.ErrorShare(c.Error)
			}
			table.Rows = append(table.Rows, []string{c.Path, formatConstant(c.Before) + " →", formatConstant(c.After), c.Unit, text})
		case Unseen:
			unseen = append(unseen, c.Path)
		}
	}
	b.Table("", table)
	b.WriteString("\n")
	for _, c := range r.Changes {
		if c.Certainty == Held {
			b.Item("held", "%s stays %s: not separable from %s", c.Path, strings.TrimSpace(formatConstant(c.After)+" "+c.Unit), cmp.Or(strings.Join(c.With, " and "), "the other constants"))
		}
	}
	for _, c := range r.Changes {
		if c.Certainty == Together {
			b.Item("together", "%s is right only with the values of %s from %s: their joint effect is known, but the value of each only to %s", c.Path, cmp.Or(joined(c.With), "the constants that are held"), r.From, render.Share(c.Error))
		}
	}
	if len(unseen) > 0 {
		b.Item("unseen", "these keep the values of %s, because they have no effect in this study: %s", r.From, joined(unseen))
	}
}
