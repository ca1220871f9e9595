package calibrate

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"vllmtuner/render"
)

func joined(names []string) string { return strings.Join(names, ", ") }

// WriteText writes the result as text.
func (r *Result) WriteText(w io.Writer) error {
	var b render.Text
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
	text := fmt.Sprintf("%s, %d of %d trials; from %s", r.Study, r.UsedTrials, r.Trials, r.From)
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
		text = fmt.Sprintf("of %d starts, %d of them refused: error %.3f GiB, before %.3g (root mean square)", r.Memory.N, r.Memory.Refused, r.Memory.After, r.Memory.Before)
		b.Item("KV cache", "%s", text)
	}
	if r.HitRate >= 0 {
		b.Item("hit rate", "of the prefix cache: median error %.1f points; not fitted", 100*r.HitRate)
	}
	text = fmt.Sprintf("%d replays of all probes in %s", r.Replays, r.Took.Round(100*time.Millisecond))
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
	fmt.Fprintf(b, "\nerror, %%         %-21s%-21s%s\n", "before", "after, fitted", "after, held out")
	fmt.Fprintf(b, "%-14s%s\n", "", strings.Repeat(fmt.Sprintf("%7s%7s%7s", "median", "p90", "max"), 3))
	for _, m := range r.Metrics {
		fmt.Fprintf(b, "%-14s", m.Metric)
		for _, s := range []Spread{m.Before, m.After, m.HeldOut} {
			for _, v := range []float64{s.Median, s.P90, s.Max} {
				text := "-"
				if s.N > 0 {
					text = formatError(100 * v)
				}
				fmt.Fprintf(b, "%7s", text)
			}
		}
		b.WriteString("\n")
	}
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
	fmt.Fprintf(b, "\n%-34s%10s%11s  %-12s%s\n", "constant", "before", "after", "unit", "error")
	var unseen []string
	for _, c := range r.Changes {
		switch c.Certainty {
		case Known, Together:
			text := ""
			switch {
			case c.Certainty == Together:
				text = "see below"
			case c.Error > 0:
				text = strings.Replace("± "+render.Share(c.Error), "± <", "<", 1)
			}
			name := fmt.Sprintf("%-34s", c.Path)
			if len(c.Path) > 33 {
				fmt.Fprintf(b, "%s\n", c.Path)
				name = strings.Repeat(" ", 34)
			}
			fmt.Fprintf(b, "%s%10s →%9s  %s\n", name, formatConstant(c.Before), formatConstant(c.After), strings.TrimSpace(fmt.Sprintf("%-12s%s", c.Unit, text)))
		case Unseen:
			unseen = append(unseen, c.Path)
		}
	}
	b.WriteString("\n")
	for _, c := range r.Changes {
		if c.Certainty == Held {
			b.Item("held", "%s stays %s: not separable from %s", c.Path, strings.TrimSpace(formatConstant(c.After)+" "+c.Unit), cmp.Or(strings.Join(c.With, " and "), "the other constants"))
		}
	}
	for _, c := range r.Changes {
		if c.Certainty == Together {
			b.Item("together", "%s is right only with the values of %s from %s: their joint effect is known, the share of each only to %s", c.Path, cmp.Or(joined(c.With), "the constants that are held"), r.From, render.Share(c.Error))
		}
	}
	if len(unseen) > 0 {
		b.Item("unseen", "these keep the values of %s, because they have no effect in this study: %s", r.From, joined(unseen))
	}
}
