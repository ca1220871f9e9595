package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/logview"
	"vllmtuner/tuner/studyfile"
)

func logsCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "logs",
		Usage:     "print the log of a trial's server",
		ArgsUsage: "STUDY TRIAL",
		Description: `STUDY is ` + studyArgument + `.
TRIAL is a number that ` + "`tuner status`" + ` shows. A long log keeps its beginning
and its end; a line between them says how much is missing.

Examples:
  tuner logs llama70b 12
  tuner logs llama70b 12 -n 50 -f`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "print the log as it grows, until the trial is done"},
			&cli.IntFlag{Name: "lines", Aliases: []string{"n"}, DefaultText: "all", Usage: "print only the last `N` lines"},
		},
		Action: onDisk(endable(finish, func(c *cli.Context) error {
			view, err := logView(c)
			if err != nil {
				return err
			}
			err = view.Print(c.Context)
			if errors.Is(err, context.Canceled) {
				return interruptedError(fmt.Sprintf("stopped following the log of trial %d; the study is not affected", view.Trial.Number))
			}
			return err
		})),
	}
}

// logView returns a view of the log that the command's arguments and flags ask for.
func logView(c *cli.Context) (*logview.View, error) {
	if c.Args().Len() != 2 {
		return nil, usage("logs needs a study and a trial's number, such as `tuner logs llama70b 0`; `tuner status` shows the numbers")
	}
	number, err := strconv.Atoi(c.Args().Get(1))
	if err != nil {
		return nil, usage("%q is not a trial's number; `tuner status` shows the numbers", c.Args().Get(1))
	}
	lines := -1
	if c.IsSet("lines") {
		if lines = c.Int("lines"); lines < 0 {
			return nil, usage("--lines %d: write a number of 0 or more", lines)
		}
	}
	dir, err := locate(c.String("root"), c.Args().First())
	if err != nil {
		return nil, err
	}
	view, study, err := logview.Open(c.Context, dir, number)
	if err != nil {
		return nil, err
	}
	if view == nil {
		return nil, noTrial(study, number)
	}
	view.Follow, view.Lines, view.Out, view.Notes = c.Bool("follow"), lines, c.App.Writer, c.App.ErrWriter
	if file, err := studyfile.Parse(study.Name, []byte(study.File)); err == nil { // a study file from another version of tuner may not parse
		view.Profile = file.Server.Simulate
	}
	return view, nil
}

// noTrial returns an error that says which trials a study has. Trials are numbered from 0 without gaps.
func noTrial(study studies.Study, number int) error {
	has := ": none has begun"
	switch n := len(study.Trials); {
	case n == 1:
		has = "; it has only trial 0"
	case n > 1:
		has = fmt.Sprintf("; it has 0 to %d", n-1)
	}
	return usage("study %s has no trial %d%s", study.Name, number, has)
}
