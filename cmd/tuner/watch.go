package main

import (
	"fmt"
	"io"
	"os/signal"
	"strings"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
)

// viewing is set while a command only looks: when the user ends it nothing is at hand that must be finished, so main says nothing.
var viewing atomic.Bool

// lookEvery is how often a study that is watched is read.
const lookEvery = 2 * time.Second

// watchStudy shows a study anew until it ends or the user ends it. On a terminal it writes over what it showed. Elsewhere it writes the
// status again when something has changed.
func watchStudy(c *cli.Context, read func() (studies.Study, error), options func(studies.Study) report.Options) error {
	viewing.Store(true)
	ctx, stop := signal.NotifyContext(c.Context, endSignals()...)
	defer stop()
	page := newPage(c.App.Writer)
	last := ""
	for {
		study, err := read()
		if err != nil {
			page.leave()
			return err
		}
		var text strings.Builder
		if err := report.StatusText(&text, study, options(study)); err != nil {
			page.leave()
			return err
		}
		last = text.String()
		if study.State != studies.Running {
			return page.end(last)
		}
		if err := page.show(last, changeOf(study)); err != nil {
			return err
		}
		if !sleep(ctx, lookEvery) {
			return page.end(last)
		}
	}
}

// changeOf differs where more than an age has changed since the study was read before.
func changeOf(study studies.Study) string {
	word, _ := report.StateOf(study)
	return fmt.Sprint(word, study.ID, study.Commits)
}

// A page is what a watched status is written on.
type page struct {
	w       io.Writer
	draws   bool // w is a terminal, of which the page takes another screen until its end
	begun   bool
	written string // the newest change that was
}

func newPage(w io.Writer) *page { return &page{w: w, draws: canDraw(w)} }

// show writes a text. On a terminal each line replaces the one before it, so that nothing flickers; what has no room is left out.
func (p *page) show(text, change string) error {
	if !p.draws {
		return p.add(text, change)
	}
	head := goHome
	if !p.begun {
		p.begun = true
		head = otherPage + goHome
	}
	_, height, _ := terminalSize(p.w)
	lines := strings.Split(strings.TrimSuffix(foreign.Text(text), "\n"), "\n")
	if room := height - 1; room > 0 && len(lines) > room {
		lines = append(lines[:room-1], "…")
	}
	_, err := io.WriteString(past(p.w), head+strings.Join(lines, eraseLine+"\r\n")+eraseLine+"\r\n"+eraseDown)
	return err
}

// add writes a text below what was written before, if it says something else.
func (p *page) add(text, change string) error {
	if change == p.written {
		return nil
	}
	gap := ""
	if p.written != "" {
		gap = "\n"
	}
	p.written = change
	_, err := io.WriteString(p.w, gap+text)
	return err
}

// leave gives a terminal its own screen back.
func (p *page) leave() {
	if p.begun {
		p.begun = false
		fmt.Fprint(past(p.w), firstPage)
	}
}

// end leaves the last text where the user sees it.
func (p *page) end(text string) error {
	p.leave()
	return p.add(text, "end")
}
