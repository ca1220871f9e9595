// Package logview prints the log of a trial's server for people, and follows it while the trial runs. It never writes
// to the study.
package logview

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"time"

	"vllmtuner/studies"
	"vllmtuner/studies/logs"
)

// A View prints the log of one trial.
type View struct {
	Dir     string // the study's directory
	Study   studies.Study
	Trial   studies.Trial
	Profile string // name of the profile if servers are simulated in virtual time and write no logs; "" otherwise
	Follow  bool
	Lines   int // how many of the last lines to print; negative means all
	Out     io.Writer
	Notes   io.Writer // gets messages that are not from the log
}

// Open reads the study in a directory and returns the View of one of its trials. The View is nil when the study has no
// such trial.
func Open(ctx context.Context, dir string, trial int) (*View, studies.Study, error) {
	v := &View{Dir: dir, Trial: studies.Trial{Number: trial}, Lines: -1, Out: io.Discard, Notes: io.Discard}
	if found, err := v.read(ctx); err != nil || !found {
		return nil, v.Study, err
	}
	return v, v.Study, nil
}

// read reads the study, with the result and probes of the trial. It reports whether the study has that trial.
func (v *View) read(ctx context.Context) (found bool, err error) {
	trial := v.Trial.Number
	whole := func(studies.Study) []int { return []int{trial} }
	v.Study, err = studies.ReadLive(ctx, v.Dir, func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, whole) })
	for _, t := range v.Study.Trials {
		if t.Number == trial {
			v.Trial, found = t, true
		}
	}
	return found, err
}

// Print prints the log. With Follow, it continues until the trial is done. If ctx ends first, it returns the cause.
func (v *View) Print(ctx context.Context) (err error) {
	log, err := v.open(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return v.explain()
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	if v.Lines >= 0 {
		if err := log.Tail(v.Lines); err != nil {
			return err
		}
	}
	if !v.Follow {
		_, err = io.Copy(v.Out, log)
		return err
	}
	return v.follow(ctx, log)
}

// open opens the log. If the View follows it, open waits for a log that does not exist yet.
func (v *View) open(ctx context.Context) (*logs.Reader, error) {
	for waiting := false; ; waiting = true {
		log, err := logs.Open(v.Dir, v.Trial.Number)
		if !errors.Is(err, fs.ErrNotExist) || !v.Follow || v.isComplete() || v.Profile != "" {
			return log, err
		}
		if !waiting {
			fmt.Fprintf(v.Notes, "waiting for the log of trial %d: its server has not started yet\n", v.Trial.Number)
		}
		if err := v.refresh(ctx); err != nil {
			return nil, err
		}
	}
}

// follow prints the log as it grows, until it is complete.
func (v *View) follow(ctx context.Context, log *logs.Reader) error {
	ctx, cancel := context.WithCancelCause(ctx)
	complete := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		for !v.isComplete() {
			if err := v.refresh(ctx); err != nil {
				cancel(err)
				return
			}
		}
		close(complete)
	})
	err := log.Follow(ctx, v.Out, complete)
	cancel(nil)
	watch.Wait()
	return err
}

// isComplete reports whether the log can no longer grow, because the trial is done or no process runs the study. A
// server's log is closed before its trial is stored as done.
func (v *View) isComplete() bool {
	return v.Trial.State == studies.Done || v.Study.State != studies.Running
}

// refresh waits a second, and then reads the study again.
func (v *View) refresh(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(time.Second):
	}
	_, err := v.read(ctx)
	return err
}

// explain says why the trial has no log, and prints the server's last lines from the stored result. Without such lines
// it returns an error, unless the servers write no logs.
func (v *View) explain() error {
	why := fmt.Sprintf("trial %d has no log: ", v.Trial.Number)
	switch {
	case v.Profile != "":
		why += fmt.Sprintf("servers simulated in virtual time (%s) write none", v.Profile)
	case v.Trial.State == studies.Done:
		why += "it was removed, or the server could not be started"
	case v.isComplete():
		why += "the study ended before its server was started"
	default:
		why += "its server has not started yet; -f waits for it"
	}
	tail := v.Trial.Result.Tail
	switch {
	case len(tail) > 0:
		fmt.Fprintln(v.Notes, why+"; the study keeps these last lines:")
	case v.Profile != "":
		fmt.Fprintln(v.Notes, why)
	default:
		return errors.New(why)
	}
	if v.Lines >= 0 {
		tail = tail[max(0, len(tail)-v.Lines):]
	}
	for _, line := range tail {
		if _, err := fmt.Fprintln(v.Out, line); err != nil {
			return err
		}
	}
	return nil
}
