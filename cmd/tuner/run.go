package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/studies/silent"
	"vllmtuner/trial"
	"vllmtuner/trial/live"
	"vllmtuner/tuner"
	"vllmtuner/tuner/insight"
	"vllmtuner/tuner/metrics"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

func runCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "run",
		Usage:     "run a study, or continue it where it stopped",
		ArgsUsage: "STUDY.yaml",
		Description: `Runs the study that a study file describes, and prints the best args found.
Press Ctrl-C once to finish the current probe (the measurement of one rate)
and stop, twice to stop at once. To continue the study, run the same command
again, also after a kill or a crash. It repeats no finished probe.

Examples:
  tuner run study.yaml
  tuner run study.yaml --root /mnt/nfs/studies --listen 127.0.0.1:9090`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "listen", Usage: "serve /healthz and /metrics at `HOST:PORT`; without a host, as in :9090, only to this machine"},
			&cli.BoolFlag{Name: "accept-drift", Usage: "continue although model, workload, machine or server changed since the study began; the SLO must not change"},
			&cli.BoolFlag{Name: "from-snapshot", Usage: "if the study's database is damaged or lost, continue from its newest snapshot"},
			takeoverFlag(),
			waitFlag(),
			&cli.BoolFlag{Name: "outcome-exit-codes", Usage: "in Kubernetes too, exit with 4 if no trial met the SLO, and with 5 if the budget ended first"},
		},
		Action: func(c *cli.Context) error {
			path, err := oneArg(c, "a study file")
			if err != nil {
				return err
			}
			after, err := takeoverOf(c)
			if err != nil {
				return err
			}
			wait, err := waitOf(c)
			if err != nil {
				return err
			}
			file, err := readStudyFile(c, path)
			if err != nil {
				return err
			}
			return outcome(runStudy(c.Context, file, runOptions{
				root: c.String("root"), listen: c.String("listen"), acceptDrift: c.Bool("accept-drift"), fromSnapshot: c.Bool("from-snapshot"), takeover: after, wait: wait,
				finish: finish, stdout: c.App.Writer, stderr: c.App.ErrWriter,
			}), c.Bool("outcome-exit-codes"))
		},
	}
}

type runOptions struct {
	root, listen   string
	acceptDrift    bool
	fromSnapshot   bool
	takeover       time.Duration   // an owner that is silent for this long counts as dead; 0 means the default
	wait           time.Duration   // how long to wait while another tuner owns the study
	health         *metrics.Server // the server of --listen; nil without that flag
	finish         <-chan struct{}
	remark         func(studies.Study) string // returns what to print after the answer; may be nil
	stdout, stderr io.Writer
}

// runStudy runs a study and prints its answer to o.stdout. Progress goes to o.stderr.
func runStudy(ctx context.Context, file *studyfile.File, o runOptions) (err error) {
	if o.listen != "" {
		if o.health, err = serveHealth(o.listen, file, o.stderr); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, o.health.Stop()) }()
	}
	p, err := plan.Open(file)
	if err != nil {
		return err
	}
	if err := p.CheckNeeds(ctx, warnings(o.stderr)); err != nil {
		return err
	}
	begun, err := p.Begin(version)
	if err != nil {
		return err
	}
	stopOptimiser, err := o.startOptimiser(ctx, p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopOptimiser()) }()
	dir := filepath.Join(o.root, file.Name)
	store, err := o.take(ctx, p, dir, begun)
	if err != nil {
		return err
	}
	ctx, stopWatching := whileOwned(ctx, store, o.stderr)
	defer interruptOptimiser(ctx, p)()
	defer func() {
		closeErr := store.Close() // Close may set store.Err, so it runs before the next line
		err = errors.Join(store.Err(), err, closeErr)
		stopWatching()
	}()
	for _, text := range store.Disk.Warnings {
		render.Warn(o.stderr, "%s", text)
	}
	if text := store.Restored; text != "" {
		render.Warn(o.stderr, "the study was restored %s", text)
	}
	study, stop, err := o.ready(ctx, p, store)
	if err != nil {
		return errors.Join(err, giveUp(store, err))
	}
	end, runErr := study.Run(ctx)
	stop()
	if errors.Is(runErr, tuner.ErrClientLimited) {
		runErr = &trial.RemedyError{Err: runErr, Remedy: p.Machine.MoreCores()}
	}
	return conclude(store, end, runErr, file.Budget.Trials, o)
}

// serveHealth serves /healthz and /metrics. It begins before anything else, because Kubernetes restarts a tuner that does
// not answer. Checks of a large dataset, the wait for another owner, and reading the weights may take many minutes.
func serveHealth(address string, file *studyfile.File, stderr io.Writer) (*metrics.Server, error) {
	socket, err := metrics.Listen(address)
	if err != nil {
		return nil, usage("--listen %w", err)
	}
	server := metrics.Serve(socket, file.Name, file.Budget.Planned(), file.Objective)
	fmt.Fprintf(stderr, "health and metrics at %s\n", server.URL())
	return server, nil
}

// ready prepares a study that this run owns for the start of its first server. The returned function stop ends the
// progress display.
func (o runOptions) ready(ctx context.Context, p *plan.Plan, store *studies.Store) (study *tuner.Study, stop func(), err error) {
	if err := reclaim(store.Dir(), "run", o.stderr); err != nil {
		return nil, nil, err
	}
	before, err := store.History(tuner.Compared)
	if err != nil {
		return nil, nil, err
	}
	if err := o.prepare(ctx, p); err != nil {
		return nil, nil, err
	}
	watch, stop := o.watchers(p, before)
	if study, err = studyOf(p, store, o, watch); err != nil {
		stop()
		return nil, nil, err
	}
	return study, stop, nil
}

// warnings returns a plan.Say that prints warnings and nothing else.
func warnings(w io.Writer) plan.Say {
	return func(name, format string, args ...any) {
		if name == plan.Warning {
			render.Warn(w, format, args...)
		}
	}
}

// reclaim ends the processes of a server that a killed run or sweep has left in dir. The killed command is "run" or
// "sweep".
func reclaim(dir, command string, w io.Writer) error {
	left, err := live.Reclaim(dir)
	if left > 0 {
		fmt.Fprintf(w, "stopped %s of a server that a killed %s had left behind\n", render.Count(left, "process"), command)
	}
	return err
}

// giveUp stores that a run ended before its first server started. Otherwise the study would stay in the state Running.
func giveUp(store *studies.Store, why error) error {
	if store.Err() != nil { // this run has lost the study, so it must not write to it
		return nil
	}
	study, err := store.Summary(func(studies.Study) []int { return nil })
	if err != nil || study.State != studies.Running {
		return err
	}
	state := studies.Stopped
	if len(study.Trials) == 0 {
		state = studies.NotBegun
	}
	note, _ := noteOf(why) // the remedy is printed with the error; only a Failed study stores one
	return store.SetState(state, note)
}

// lostGrace is how long a run may take to end its server after it lost its study. A run may never end by itself: a
// write to a disk that does not answer waits forever.
const lostGrace = time.Minute

// whileOwned returns a context that ends when this process loses the study, and a function that releases it. If the run
// does not end within lostGrace after the loss, whileOwned exits the process; the watchdog then kills the servers.
func whileOwned(ctx context.Context, store *studies.Store, stderr io.Writer) (owned context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	over, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		select {
		case <-over:
			return
		case <-store.Lost():
			cancel(store.Err())
		}
		select {
		case <-over:
		case <-time.After(lostGrace):
			fmt.Fprintf(stderr, "tuner: %v; the run did not end within %s\n", store.Err(), render.Took(lostGrace))
			os.Exit(exitOwned)
		}
	}()
	return ctx, func() {
		close(over)
		<-gone
		cancel(nil)
	}
}

// take checks the study and makes this run its owner. From then on the Store reports a disk that does not answer.
func (o runOptions) take(ctx context.Context, p *plan.Plan, dir string, begun studies.New) (*studies.Store, error) {
	disks := []string{dir}
	isNew, err := silent.Watch(ctx, o.stderr, disks, func() (bool, error) {
		if err := studies.CheckDir(dir); err != nil {
			return false, err
		}
		before, err := readResults(dir)
		return err != nil || len(before.Trials) == 0, live.CheckRecord(dir)
	})
	if err != nil {
		return nil, err
	}
	if isNew { // a study whose flags the server refuses must not begin
		if err := o.checkFlags(ctx, p); err != nil {
			return nil, err
		}
	}
	return silent.Watch(ctx, o.stderr, disks, func() (*studies.Store, error) { return o.open(ctx, dir, begun) })
}

// checkFlags asks the server for its flags before the study begins. This takes time but needs no GPU.
func (o runOptions) checkFlags(ctx context.Context, p *plan.Plan) error {
	ctx, cancel := orderly(ctx, o.finish)
	defer cancel()
	err := p.CheckFlags(ctx, func(string, string, ...any) {}, true)
	_, isUsers := errors.AsType[plan.InputError](err)
	switch {
	case err != nil && ctx.Err() != nil:
		return trial.ErrInterrupted
	case err != nil && !isUsers:
		// A wrapper around the server may not know --help=all. Then a wrong flag costs one failed start.
		render.Warn(o.stderr, "the flags are not checked, so a start fails if one of them is wrong: %v", err)
		return nil
	}
	return err
}

// open makes this run the study's owner. It may have to wait until the previous owner is known to be gone.
func (o runOptions) open(ctx context.Context, dir string, begun studies.New) (*studies.Store, error) {
	ctx, cancel := orderly(ctx, o.finish)
	defer cancel()
	store, err := whenFree(ctx, o.wait, o.stderr, func() (*studies.Store, error) {
		store, _, err := studies.Open(ctx, dir, begun, studies.Options{AcceptDrift: o.acceptDrift, FromSnapshot: o.fromSnapshot, TakeoverAfter: o.takeover})
		return store, err
	})
	if errors.Is(err, context.Canceled) {
		return nil, interruptedError("interrupted before this run owned the study; nothing is lost")
	}
	return store, err
}

// prepare makes the model ready to load. It returns trial.ErrInterrupted if the user asks for an end meanwhile.
func (o runOptions) prepare(ctx context.Context, p *plan.Plan) error {
	ctx, cancel := orderly(ctx, o.finish)
	defer cancel()
	err := prepareModel(ctx, p, o.stderr)
	if err != nil && ctx.Err() != nil {
		return trial.ErrInterrupted
	}
	return err
}

// watchers starts the progress display. The returned function watch passes an event to the display and to the metrics;
// stop ends the display.
func (o runOptions) watchers(p *plan.Plan, before studies.Study) (watch func(tuner.Event), stop func()) {
	progress := newProgress(o.stderr, before, p.Search.Names(), p.File.Budget.Planned())
	progress.showOptimiser(p)
	if o.health == nil {
		return progress.watch, progress.shown.End
	}
	o.health.Resume(before)
	watch = func(e tuner.Event) {
		progress.watch(e)
		o.health.Watch(e)
	}
	return watch, progress.shown.End
}

// noteOf returns a study's note on the error that ended a run, and what the user can do; "" if that is not known. The
// note is one line, even if several errors were joined.
func noteOf(err error) (note, remedy string) {
	if advised, ok := err.(*trial.RemedyError); ok {
		err, remedy = advised.Err, advised.Remedy
	}
	return strings.ReplaceAll(err.Error(), "\n", "; "), remedy
}

// conclude stores the end of the study and prints its answer. If no trial met the SLO, it returns an error.
func conclude(store *studies.Store, end tuner.End, runErr error, planned int, o runOptions) error {
	switch {
	case errors.Is(runErr, trial.ErrInterrupted), errors.Is(runErr, errStoppedNow):
		err := store.SetState(studies.Stopped, "interrupted; `tuner run` goes on")
		return errors.Join(fmt.Errorf("%w; finished probes are stored: run the study again to continue", runErr), err)
	case runErr != nil:
		note, remedy := noteOf(runErr)
		return errors.Join(runErr, store.Fail(note, remedy))
	}
	study, err := store.Summary(insight.Whole)
	if err != nil {
		return err
	}
	study.State, study.Note = end.State(study, planned)
	if err := store.SetState(study.State, study.Note); err != nil {
		return err
	}
	options := bestOptions(study, o.stdout)
	if err := report.BestText(o.stdout, study, options); err != nil {
		return err
	}
	if o.remark != nil {
		fmt.Fprintf(o.stdout, "\n%s", render.Paragraph(o.remark(study), "", options.Width))
	}
	fmt.Fprintf(o.stdout, "\nThe study is in %s\n", store.Dir())
	if study.State == studies.Spent {
		return errSpent
	}
	if _, met := report.Best(study.Present()); !met { // trials from before a change of the world do not count
		return errNothingMet
	}
	return nil
}
