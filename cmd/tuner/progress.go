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

// A progress shows how far a study is: one line for each trial, and on a terminal a last line with the remaining time.
type progress struct {
	shown    *render.Progress
	width    func() int        // of a line, in columns
	short    map[string]string // names of the searched flags
	trials   int               // in all
	finished int
	best     incumbent
	began    time.Time
	ended    time.Time // when the last trial ended
	measured int       // trials that this process finished
}

// newProgress begins with the trials that the study has already.
func newProgress(w io.Writer, s studies.Study, names []string, trials int) *progress {
	now := time.Now()
	p := &progress{
		shown: render.NewProgress(w), width: func() int { return render.LineColumns(w) }, short: render.ShortNames(names), trials: trials,
		best: incumbentOf(s), began: now, ended: now,
	}
	fmt.Fprint(w, render.Legend(p.short, render.Columns(w)))
	for _, t := range s.Trials {
		if t.State == studies.Done && t.Counts() {
			p.finished++
		}
	}
	if len(s.Trials) > 0 {
		best := "none has met the SLO yet"
		if p.best.rate > 0 {
			best = fmt.Sprintf("best so far %s req/s", render.Number(p.best.rate))
		}
		p.shown.Line(0, "going on: %s, %s", render.Done(p.finished, trials, "trial"), best)
	}
	return p
}

// An incumbent is the best trial so far in the present world.
type incumbent struct {
	rate    float64 // its capacity; 0 while none has met the SLO
	version string  // of its server; on a server of another version the search for the best begins again
}

func incumbentOf(s studies.Study) (b incumbent) {
	for _, t := range s.Present().Trials {
		if t.State == studies.Done {
			b.replacedBy(t)
		}
	}
	return b
}

// replacedBy makes a finished trial the incumbent if it is better.
func (b *incumbent) replacedBy(t studies.Trial) bool {
	if t.Version != "" && t.Version != b.version { // a server that does not start tells no version
		*b = incumbent{version: t.Version}
	}
	if !t.Met() || t.Result.Capacity.Carried() <= b.rate {
		return false
	}
	b.rate = t.Result.Capacity.Carried()
	return true
}

// watch shows an event of the study.
func (p *progress) watch(e tuner.Event) {
	switch e.Kind {
	case tuner.Step:
		p.step(fmt.Sprintf("trial %d, %s", e.Trial.Number, e.Step))
	case tuner.Probed:
		verdict := "passed"
		switch {
		case e.Probe.Verdict.ClientLimited != "":
			verdict = "client-limited"
		case !e.Probe.Verdict.Pass:
			verdict = "failed"
		}
		p.step(fmt.Sprintf("trial %d, %s req/s %s", e.Trial.Number, render.Number(e.Probe.Rate), verdict))
	case tuner.Ended:
		p.measured++
		p.finished++
		p.ended = time.Now()
		mark := ""
		if p.best.replacedBy(e.Trial) {
			mark = "*"
		}
		if left := render.Left(p.left()); !p.shown.Draws() && left != "" {
			mark += " (" + left + ")"
		}
		width := p.width()
		p.shown.Print(report.TrialLines(e.Trial, p.short, mark, width))
		width = min(width, render.DefaultWidth)
		margin := strings.Repeat(" ", min(10, width/4))
		for _, line := range report.LastWords(e.Trial, width-len(margin)) {
			p.shown.Print([]string{margin + line})
		}
		p.step("")
	}
}

// step shows what goes on now. A log gets no line that names no step.
func (p *progress) step(text string) {
	if text == "" && !p.shown.Draws() {
		return
	}
	p.shown.Show(render.Stage{
		Head: render.Done(p.finished, p.trials, "trial"), Share: float64(p.finished) / float64(max(1, p.trials)), Until: render.After(p.left()), Step: text,
	})
}

// left is the remaining time, from the mean duration of this process's trials; 0 where it is not known.
func (p *progress) left() time.Duration {
	todo := p.trials - p.finished
	if p.measured == 0 || todo <= 0 {
		return 0
	}
	each := p.ended.Sub(p.began) / time.Duration(p.measured)
	return each*time.Duration(todo) - min(each, time.Since(p.ended))
}

// done removes the last line.
func (p *progress) done() error {
	p.shown.End()
	return nil
}
