package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner"
)

// A progress tells a person how far a study is: one line a trial, and on a terminal a bar with the time that is left.
type progress struct {
	w        io.Writer
	bar      *statusBar        // nil when w is no terminal
	short    map[string]string // names of the searched flags
	trials   int               // in all
	best     incumbent
	began    time.Time
	measured int // trials finished by this process
	last     time.Time
}

// newProgress begins with the trials that are there already.
func newProgress(w io.Writer, s studies.Study, names []string, trials int) *progress {
	p := &progress{w: w, short: report.ShortNames(names), trials: trials, began: time.Now()}
	fmt.Fprint(w, report.Legend(p.short))
	p.bar = terminalBar(w, trials)
	p.best = incumbentOf(s)
	finished := 0
	for _, t := range s.Trials {
		if t.State == studies.Done {
			p.advance()
			finished++
		}
	}
	if len(s.Trials) > 0 {
		best := "none has met the SLO yet"
		if p.best.rate > 0 {
			best = fmt.Sprintf("best so far %.3g req/s", p.best.rate)
		}
		p.line("going on after %d of %d trials, %s", finished, trials, best)
	}
	return p
}

// A statusBar is drawn past the terminal's writer, which would leave out what it is drawn with.
type statusBar struct{ *progressbar.ProgressBar }

// Describe says what is at hand, which may be a server's own words.
func (b statusBar) Describe(text string) { b.ProgressBar.Describe(foreign.Text(text)) }

// terminalBar returns a bar of so many steps with the time that is left, nil when w is no terminal that can draw one.
func terminalBar(w io.Writer, steps int) *statusBar {
	if plain, ok := w.(*foreign.Writer); ok {
		w = plain.Unwrap()
	}
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) || os.Getenv("TERM") == "dumb" {
		return nil
	}
	return &statusBar{progressbar.NewOptions(steps,
		progressbar.OptionSetWriter(w), progressbar.OptionSetWidth(16), progressbar.OptionClearOnFinish(),
		progressbar.OptionSetPredictTime(true), progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionUseANSICodes(os.Getenv("NO_COLOR") == ""),
		progressbar.OptionSetMaxDetailRow(0), progressbar.OptionSetRenderBlankState(true))}
}

// advance moves the bar by a trial.
func (p *progress) advance() {
	if p.bar != nil {
		_ = p.bar.Add(1) // a bar that cannot be drawn is no reason to stop
	}
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
	if !t.Met() || t.Result.Capacity.Rate <= b.rate {
		return false
	}
	b.rate = t.Result.Capacity.Rate
	return true
}

// line writes a line above the bar.
func (p *progress) line(format string, args ...any) {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
	fmt.Fprintf(p.w, format+"\n", args...)
}

// watch shows one event.
func (p *progress) watch(e tuner.Event) {
	switch e.Kind {
	case tuner.Step:
		p.step(fmt.Sprintf("trial %d/%d %s", e.Trial.Number+1, p.trials, e.Step))
	case tuner.Probed:
		verdict := "passed"
		if !e.Probe.Verdict.Pass {
			verdict = "failed"
		}
		p.step(fmt.Sprintf("trial %d/%d %.3g req/s %s", e.Trial.Number+1, p.trials, e.Probe.Rate, verdict))
	case tuner.Ended:
		p.measured++
		mark := ""
		p.advance()
		if p.best.beaten(e.Trial) {
			mark = "  *"
		}
		p.line("%s%s%s", report.TrialLine(e.Trial, p.short), mark, p.left(e.Trial))
		for _, line := range report.LastWords(e.Trial) {
			p.line("          %s", line)
		}
	}
}

// signOfLife is how often a log is told what goes on: it needs a sign of life, not every step. Tests want them all.
var signOfLife = 10 * time.Second

// step says what goes on: in the bar, or as a line now and then when there is no terminal.
func (p *progress) step(text string) {
	if p.bar != nil {
		p.bar.Describe(text)
		return
	}
	if time.Since(p.last) >= signOfLife {
		p.last = time.Now()
		p.line("%s", text)
	}
}

// left is the time that is left, for a log; the bar has its own.
func (p *progress) left(t studies.Trial) string {
	todo := p.trials - t.Number - 1
	each := time.Since(p.began) / time.Duration(p.measured)
	if p.bar != nil || todo <= 0 || each < time.Second {
		return ""
	}
	return fmt.Sprintf("  (about %s left)", (each * time.Duration(todo)).Round(time.Minute))
}

// done removes the bar.
func (p *progress) done() error {
	if p.bar == nil {
		return nil
	}
	return p.bar.Clear()
}
