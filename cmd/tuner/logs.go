package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/logs"
	"vllmtuner/tuner/studyfile"
)

func logsCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "logs",
		Usage:     "print the log of a trial's server",
		ArgsUsage: "STUDY TRIAL",
		Description: `STUDY is ` + studyArgument + `,
TRIAL a number as ` + "`tuner status`" + ` shows it. Of a long log the beginning and
the end are kept, and a line says how much is missing between them.

Examples:
  tuner logs llama70b 12
  tuner logs llama70b 12 -n 50 -f`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.BoolFlag{Name: "follow", Aliases: []string{"f"}, Usage: "go on as the log grows, until the trial is done"},
			&cli.IntFlag{Name: "lines", Aliases: []string{"n"}, DefaultText: "all", Usage: "print only the last `N` lines"},
		},
		Action: onDisk(func(c *cli.Context) error {
			ctx, cancel := orderly(c.Context, finish)
			defer cancel()
			view, err := newLogView(c)
			if err != nil {
				return err
			}
			return view.print(ctx)
		}),
	}
}

// A logView prints the log of one trial.
type logView struct {
	dir    string // the study's
	study  studies.Study
	trial  studies.Trial
	follow bool
	lines  int // so many of the last; all when negative
	out    io.Writer
	notes  io.Writer // gets what is no line of the log
}

// newLogView finds the trial that the command's arguments name.
func newLogView(c *cli.Context) (*logView, error) {
	if c.Args().Len() != 2 {
		return nil, usage("logs needs two arguments: %s; and the number of a trial; see `tuner logs --help`", studyArgument)
	}
	number, err := strconv.Atoi(c.Args().Get(1))
	if err != nil {
		return nil, usage("%q is no number of a trial; `tuner status` shows them", c.Args().Get(1))
	}
	v := &logView{follow: c.Bool("follow"), lines: -1, out: c.App.Writer, notes: c.App.ErrWriter}
	if c.IsSet("lines") {
		if v.lines = c.Int("lines"); v.lines < 0 {
			return nil, usage("--lines %d: a number of lines is not below 0", v.lines)
		}
	}
	if v.dir, err = locate(c.String("root"), c.Args().First()); err != nil {
		return nil, err
	}
	v.study, err = studies.ReadLive(c.Context, v.dir, func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, only(number)) })
	if err != nil {
		return nil, err
	}
	var known []int
	for _, t := range v.study.Trials {
		if t.Number == number {
			v.trial = t
			return v, nil
		}
		known = append(known, t.Number)
	}
	if len(known) == 0 {
		return nil, usage("study %s has no trial %d: none has begun", v.study.Name, number)
	}
	return nil, usage("study %s has no trial %d; there are: %s", v.study.Name, number, ranges(known))
}

// only is the trial of that number, where there is one.
func only(number int) func(studies.Study) []int {
	return func(study studies.Study) []int {
		for _, t := range study.Trials {
			if t.Number == number {
				return []int{number}
			}
		}
		return nil
	}
}

// ranges writes sorted numbers, such as 0 to 4, 6.
func ranges(numbers []int) string {
	var words []string
	for i := 0; i < len(numbers); {
		first := i
		for i++; i < len(numbers) && numbers[i] == numbers[i-1]+1; i++ {
		}
		word := strconv.Itoa(numbers[first])
		if i-first > 1 {
			word += " to " + strconv.Itoa(numbers[i-1])
		}
		words = append(words, word)
	}
	return strings.Join(words, ", ")
}

// print prints what there is of the log, and goes on with it when it is to be followed.
func (v *logView) print(ctx context.Context) (err error) {
	log, err := v.open(ctx)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return v.explain()
	case errors.Is(err, context.Canceled):
		return v.interrupted()
	case err != nil:
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	if v.lines >= 0 {
		if err := log.Tail(v.lines); err != nil {
			return err
		}
	}
	if !v.follow {
		_, err = io.Copy(v.out, log)
		return err
	}
	if err := v.goOn(ctx, log); !errors.Is(err, context.Canceled) {
		return err
	}
	return v.interrupted()
}

func (v *logView) interrupted() error {
	return interruptedError(fmt.Sprintf("the log of trial %d is followed no longer; the study is not touched", v.trial.Number))
}

// open opens the log. One that is to be followed may be yet to come.
func (v *logView) open(ctx context.Context) (*logs.Reader, error) {
	for waiting := false; ; waiting = true {
		log, err := logs.Open(v.dir, v.trial.Number)
		if !errors.Is(err, fs.ErrNotExist) || !v.follow || v.over() || v.profile() != "" {
			return log, err
		}
		if !waiting {
			fmt.Fprintf(v.notes, "waiting for the log of trial %d: its server is not started yet\n", v.trial.Number)
		}
		if err := v.look(ctx); err != nil {
			return nil, err
		}
	}
}

// goOn prints the log as it grows, until the trial is over.
func (v *logView) goOn(ctx context.Context, log *logs.Reader) error {
	ctx, cancel := context.WithCancelCause(ctx)
	over := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		for !v.over() {
			if err := v.look(ctx); err != nil {
				cancel(err)
				return
			}
		}
		close(over)
	})
	err := log.Follow(ctx, v.out, over)
	cancel(nil)
	watch.Wait()
	return err
}

// over reports whether nothing more can come: the trial is done, or nobody is at work on the study. A log is closed before
// its trial is done.
func (v *logView) over() bool {
	return v.trial.State == studies.Done || v.study.State != studies.Running
}

// look reads the study again, after a second.
func (v *logView) look(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(time.Second):
	}
	study, err := studies.ReadLive(ctx, v.dir, func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, only(v.trial.Number)) })
	if err != nil {
		return err
	}
	v.study = study
	for _, t := range study.Trials {
		if t.Number == v.trial.Number {
			v.trial = t
		}
	}
	return nil
}

// profile is that of a study whose servers are simulated in virtual time; empty when they are processes.
func (v *logView) profile() string {
	file, err := studyfile.Parse(v.study.Name, []byte(v.study.File))
	if err != nil {
		return "" // a file of another version, which tells us nothing
	}
	return file.Server.Simulate
}

// explain says why a trial has no log, and prints what the study itself keeps of it. Where there can be none, that is no error.
func (v *logView) explain() error {
	profile := v.profile()
	why := fmt.Sprintf("trial %d has no log: ", v.trial.Number)
	switch {
	case profile != "":
		why += fmt.Sprintf("servers simulated in virtual time (%s) write none", profile)
	case v.trial.State == studies.Done:
		why += "it was removed, or the server could not be started"
	case v.over():
		why += "the study ended before its server was started"
	default:
		why += "its server is not started yet; -f waits for it"
	}
	tail := v.trial.Result.Tail
	switch {
	case len(tail) > 0:
		fmt.Fprintln(v.notes, why+"; the study keeps these last lines:")
	case profile != "":
		fmt.Fprintln(v.notes, why)
	default:
		return errors.New(why)
	}
	if v.lines >= 0 {
		tail = tail[max(0, len(tail)-v.lines):]
	}
	for _, line := range tail {
		if _, err := fmt.Fprintln(v.out, line); err != nil {
			return err
		}
	}
	return nil
}
