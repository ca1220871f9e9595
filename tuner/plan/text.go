package plan

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/trial/capacity"
)

// Text returns a description of the study with an estimate of its time, in lines of at most width columns.
func (p *Plan) Text(width int) string {
	t := render.Text{Width: width}
	f := p.File
	probe := f.Probe.LeadIn + p.Load.Window()
	each, probes := typicalStart+typicalProbes*probe, "in full"
	if f.Budget.MinGain > 0 {
		each, probes = typicalStart+typicalRace*probe, "in a race against the best"
	}
	all := each*time.Duration(f.Budget.Trials) + (typicalProbes-typicalRace)*probe // the first trial races against nobody
	limit := ""
	if f.Budget.GPUTime > 0 {
		limit = fmt.Sprintf(" (at most %s, by budget.gpu_time)", render.Span(f.Budget.GPUTime))
	}
	confirmations := ""
	if n := f.Budget.Confirm; n > 0 {
		all += time.Duration(n+1) * (typicalStart + typicalRace*(p.Load.confirm().LeadIn+p.Load.confirm().Window))
		confirmations = fmt.Sprintf(", then the best %d and the default once more; up to %d times while it is open which is better", n, capacity.MaxRounds)
	}
	t.Paragraph(fmt.Sprintf("plan: %s by %s, cache %s, window %s; about %s per trial, %s in all%s", render.Count(f.Budget.Trials, "trial"),
		cmp.Or(strings.Join(f.Sampler.Command, " "), f.Sampler.Name), p.Load.Protocol(), render.Span(p.Load.Window()), render.Span(each), render.Span(all), limit), "  ")
	t.Paragraph(fmt.Sprintf("each trial is measured %s%s", probes, confirmations), "  ")
	switch why := f.NoPrediction(); {
	case why == "":
		t.Paragraph("after the first trial the simulator, scaled to it, predicts the other points: the model learns how far that is true", "  ")
	case f.Prior.Simulate && f.Server.Simulate == "" && f.Sampler.Learns():
		t.Paragraph("the simulator predicts nothing: "+why, "  ")
	}
	if gpus := gpusText(f); gpus != "" {
		t.Paragraph(gpus, "  ")
	}
	if precision := f.Probe.Precision; precision > 0 {
		longest := typicalStart + time.Duration(f.Probe.MaxProbes)*probe
		t.Paragraph(fmt.Sprintf("precision: each trial goes on until its capacity is known to ±%.3g %% (95 %% interval), "+
			"for at most %s, about %s; the estimate above does not include this",
			100*precision, render.Count(f.Probe.MaxProbes, "probe"), render.Span(longest)), "  ")
	}
	return t.String()
}
