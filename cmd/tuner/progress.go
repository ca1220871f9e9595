package main

import (
	"fmt"
	"io"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner"
)

// A progress shows the progress of a study: one line for each trial, and on a terminal a last line with the remaining
// time.
type progress struct {
	w        io.Writer
	shown    *render.Progress
	short    map[string]string // short names of the searched flags
	trials   int               // number of trials in the budget
	finished int               // number of finished trials, earlier processes included
	began    time.Time
	ended    time.Time // when the last trial of this process ended; the same as began if no trial has ended
	measured int       // number of trials that this process finished
}

// newProgress returns a progress that counts the finished trials of s.
func newProgress(w io.Writer, s studies.Study, names []string, trials int) *progress {
	now := time.Now()
	p := &progress{
		w: w, shown: render.NewProgress(w), short: render.ShortNames(names), trials: trials,
		began: now, ended: now,
	}
	fmt.Fprint(w, render.Legend(p.short, render.Columns(w)))
	for _, t := range s.Trials {
		if t.State == studies.Done && t.Counts() {
			p.finished++
		}
	}
	if len(s.Trials) > 0 {
		best := "none has met the SLO yet"
		if t, found := tuner.Incumbent(s); found {
			best = fmt.Sprintf("best so far %s req/s%s", render.Number(s.Objective().Of(t).Carried()), s.Objective().Per())
		}
		p.shown.Line(0, "going on: %s, %s", render.Done(p.finished, trials, "trial"), best)
	}
	return p
}

// watch shows an event of the study.
func (p *progress) watch(e tuner.Event) {
	switch e.Kind {
	case tuner.Began:
		p.trials = max(p.trials, p.finished+1) // further rounds of confirmations are not planned
	case tuner.Step:
		p.step(fmt.Sprintf("trial %d, %s", e.Trial.Number, e.Step))
	case tuner.Remark:
		p.shown.Line(0, "%s", e.Step)
	case tuner.Probed:
		p.step(fmt.Sprintf("trial %d, %s req/s %s", e.Trial.Number, render.Number(e.Probe.Rate), e.Probe.Verdict.Word()))
	case tuner.Ended:
		p.measured++
		p.finished++
		p.ended = time.Now()
		mark := ""
		if e.Best {
			mark = "*"
		}
		if left := render.Left(p.left()); !p.shown.Draws() && left != "" {
			mark += " (" + left + ")"
		}
		p.shown.Print(report.TrialLines(e.Trial, p.short, mark, render.LineColumns(p.w)))
		width := render.Columns(p.w)
		margin := strings.Repeat(" ", min(10, width/4))
		for _, line := range report.LastWords(e.Trial, width-len(margin)) {
			p.shown.Print([]string{margin + line})
		}
		p.step("")
	}
}

// step shows the current step of the trial. A log gets no line for an empty step.
func (p *progress) step(text string) {
	if text == "" && !p.shown.Draws() {
		return
	}
	p.shown.Show(render.Stage{
		Head: render.Done(p.finished, p.trials, "trial"), Share: float64(p.finished) / float64(max(1, p.trials)), Until: render.After(p.left()), Step: text,
	})
}

// left estimates the remaining time from the mean duration of this process's trials. It returns 0 if the time is
// unknown.
func (p *progress) left() time.Duration {
	todo := p.trials - p.finished
	if p.measured == 0 || todo <= 0 {
		return 0
	}
	each := p.ended.Sub(p.began) / time.Duration(p.measured)
	return each*time.Duration(todo) - min(each, time.Since(p.ended))
}
