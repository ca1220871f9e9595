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

// A progress tells a person how far a study is: one line a trial, and on a terminal a last line with the time that is left.
type progress struct {
	w        io.Writer
	live     *liveLine         // nil when w is no terminal
	short    map[string]string // names of the searched flags
	trials   int               // in all
	finished int
	best     incumbent
	began    time.Time
	ended    time.Time // the last trial
	measured int       // trials finished by this process
	last     time.Time
}

// newProgress begins with the trials that are there already.
func newProgress(w io.Writer, s studies.Study, names []string, trials int) *progress {
	now := time.Now()
	p := &progress{w: w, live: newLiveLine(w), short: report.ShortNames(names), trials: trials, best: incumbentOf(s), began: now, ended: now}
	fmt.Fprint(w, report.Legend(p.short, columns(w)))
	for _, t := range s.Trials {
		if t.State == studies.Done && t.Counts() {
			p.finished++
		}
	}
	if len(s.Trials) > 0 {
		best := "none has met the SLO yet"
		if p.best.rate > 0 {
			best = fmt.Sprintf("best so far %.3g req/s", p.best.rate)
		}
		p.line("going on: %s, %s", render.Done(p.finished, trials, "trial"), best)
	}
	return p
}

// An incumbent is the best trial so far of the world as it is.
type incumbent struct {
	rate    float64 // its capacity; 0 while none has met the SLO
	version string  // of the server: that of another begins anew
}

func incumbentOf(s studies.Study) (b incumbent) {
	for _, t := range s.Present().Trials {
		if t.State == studies.Done {
			b.beaten(t)
		}
	}
	return b
}

// beaten makes a finished trial the incumbent if it is better.
func (b *incumbent) beaten(t studies.Trial) bool {
	if t.Version != "" && t.Version != b.version { // a server that does not start says none
		*b = incumbent{version: t.Version}
	}
	if !t.Met() || t.Result.Capacity.Carried() <= b.rate {
		return false
	}
	b.rate = t.Result.Capacity.Carried()
	return true
}

// line writes a line above the last one, broken between words where the terminal is narrow.
func (p *progress) line(format string, args ...any) {
	p.print(render.Wrap(fmt.Sprintf(format, args...), lineColumns(p.w)))
}

// print writes lines above the last one.
func (p *progress) print(lines []string) {
	width := lineColumns(p.w)
	p.live.above(func() {
		for _, line := range lines {
			fmt.Fprintln(p.w, render.Clip(line, width))
		}
	})
}

// watch shows one event.
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
		p.step(fmt.Sprintf("trial %d, %.3g req/s %s", e.Trial.Number, e.Probe.Rate, verdict))
	case tuner.Ended:
		p.measured++
		p.finished++
		p.ended = time.Now()
		mark := ""
		if p.best.beaten(e.Trial) {
			mark = "*"
		}
		if left := render.Left(p.left()); p.live == nil && left != "" {
			mark += " (" + left + ")"
		}
		width := lineColumns(p.w)
		p.print(report.TrialLines(e.Trial, p.short, mark, width))
		width = min(width, usualWidth)
		margin := strings.Repeat(" ", min(10, width/4))
		for _, line := range report.LastWords(e.Trial, width-len(margin)) {
			p.print([]string{margin + line})
		}
		p.step("")
	}
}

// signOfLife is how often a log is told what goes on: it needs a sign of life, not every step. Tests want them all.
var signOfLife = 10 * time.Second

// step says what goes on: in the last line, or as a line now and then when there is no terminal.
func (p *progress) step(text string) {
	now := stage{render.Done(p.finished, p.trials, "trial"), float64(p.finished) / float64(max(1, p.trials)), after(p.left()), text}
	switch {
	case p.live != nil:
		p.live.show(now)
	case text != "" && time.Since(p.last) >= signOfLife:
		p.last = time.Now()
		p.line("%s", now.text())
	}
}

// left is the time that is left by the mean of this process's trials; 0 where it is not known.
func (p *progress) left() time.Duration {
	todo := p.trials - p.finished
	if p.measured == 0 || todo <= 0 {
		return 0
	}
	each := p.ended.Sub(p.began) / time.Duration(p.measured)
	return each*time.Duration(todo) - min(each, time.Since(p.ended))
}

// done takes the last line away.
func (p *progress) done() error {
	p.live.end()
	return nil
}
