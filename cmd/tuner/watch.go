package main

import (
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
)

// viewing is true while `tuner status --watch` runs. That command has no step to finish, so main does not announce one
// after Ctrl-C.
var viewing atomic.Bool

// watchInterval is how often a watched study is read.
const watchInterval = 2 * time.Second

// watchStudy shows a study until it ends or the user ends the command. On a terminal each status replaces the one
// before it. Elsewhere, such as in a file, a status is written whenever the study has changed.
func watchStudy(c *cli.Context, finish <-chan struct{}, read func() (studies.Study, error),
	options func(studies.Study) report.Options) error {
	viewing.Store(true)
	ctx, stop := orderly(c.Context, finish)
	defer stop()
	page := render.NewPage(c.App.Writer)
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
		last := text.String()
		if study.State != studies.Running {
			return page.End(last)
		}
		if err := page.Show(last, versionOf(study)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return page.End(last)
		case <-time.After(watchInterval):
		}
	}
}

// versionOf returns a text that changes when the study changes, but not when only the ages in the report change.
func versionOf(study studies.Study) string {
	word, _ := report.StateOf(study)
	return fmt.Sprint(word, study.ID, study.Commits)
}
