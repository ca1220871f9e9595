package plan

import (
	"fmt"
	"time"

	"vllmtuner/render"
)

// Text returns a description of the study with an estimate of its time, in lines of at most width columns.
func (p *Plan) Text(width int) string {
	t := render.Text{Width: width}
	f := p.File
	probe := f.Probe.LeadIn + p.Load.Window()
	each, probes := TypicalStart+TypicalProbes*probe, "in full"
	if f.Budget.MinGain > 0 {
		each, probes = TypicalStart+TypicalRace*probe, "in a race against the best"
	}
	all := each*time.Duration(f.Budget.Trials) + (TypicalProbes-TypicalRace)*probe // the first trial races against nobody
	limit := ""
	if f.Budget.GPUTime > 0 {
		limit = fmt.Sprintf(" (at most %s, by budget.gpu_time)", render.Span(f.Budget.GPUTime))
	}
	confirmations := ""
	if n := f.Budget.Confirm; n > 0 {
		all += time.Duration(n+1) * (TypicalStart + TypicalRace*(p.Load.confirm().LeadIn+p.Load.confirm().Window))
		confirmations = fmt.Sprintf(", then the best %d and the default once more", n)
	}
	t.Paragraph(fmt.Sprintf("plan: %s by %s, cache %s, window %s; about %s per trial, %s in all%s", render.Count(f.Budget.Trials, "trial"),
		f.Sampler.Name, p.Load.Protocol(), render.Span(p.Load.Window()), render.Span(each), render.Span(all), limit), "  ")
	t.Paragraph(fmt.Sprintf("each trial is measured %s%s", probes, confirmations), "  ")
	if precision := f.Probe.Precision; precision > 0 {
		longest := TypicalStart + time.Duration(f.Probe.MaxProbes)*probe
		t.Paragraph(fmt.Sprintf("precision: each trial goes on until its capacity is known to ±%.3g %% (95 %% interval), "+
			"for at most %s, about %s; the estimate above does not include this",
			100*precision, render.Count(f.Probe.MaxProbes, "probe"), render.Span(longest)), "  ")
	}
	return t.String()
}
