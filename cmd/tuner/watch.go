package main

import (
	"fmt"
	"os/signal"
	"strings"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
)

// viewing is set while a command only shows something. When the user ends it, there is nothing to finish, so main says nothing.
var viewing atomic.Bool

// watchInterval is how often a watched study is read.
const watchInterval = 2 * time.Second

// watchStudy shows a study until it ends or the user ends the command. On a terminal each status replaces the one before it.
// Elsewhere the status is written again when something has changed.
func watchStudy(c *cli.Context, read func() (studies.Study, error), options func(studies.Study) report.Options) error {
	viewing.Store(true)
	ctx, stop := signal.NotifyContext(c.Context, endSignals()...)
	defer stop()
	page := render.NewPage(c.App.Writer)
	last := ""
	for {
		study, err := read()
		if err != nil {
			page.Leave()
			return err
		}
		var text strings.Builder
		if err := report.StatusText(&text, study, options(study)); err != nil {
			page.Leave()
			return err
		}
		last = text.String()
		if study.State != studies.Running {
			return page.End(last)
		}
		if err := page.Show(last, versionOf(study)); err != nil {
			return err
		}
		if !sleep(ctx, watchInterval) {
			return page.End(last)
		}
	}
}

// versionOf differs between two readings of a study unless nothing but ages has changed.
func versionOf(study studies.Study) string {
	word, _ := report.StateOf(study)
	return fmt.Sprint(word, study.ID, study.Commits)
}
