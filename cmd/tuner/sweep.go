package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/live"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

func sweepCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "sweep",
		Usage:     "measure named configs at every rate of a grid, as manual sweeps do",
		ArgsUsage: "STUDY.yaml",
		Description: `Starts one server for each config in the file's sweep section, warms it up,
and measures it at each rate or concurrency in rising order: p99 tables, what
keeps the SLO, and the highest rate of each. With server.simulate it takes
seconds and no GPU. A config that cannot start is a row that says why. Ctrl-C
once finishes the rate at hand; twice stops at once. Both print what there is.

Examples:
  tuner sweep docs/examples/phase1.yaml
  tuner sweep sweep.yaml --dry-run
  tuner sweep sweep.yaml --config phase0,phase1-moderate --out results

Exit codes: 0 done; 1 no config could be measured, or something went wrong;
2 the file or the command line is wrong; 4 no config kept the SLO at any rate;
130 interrupted. See docs/sweep.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringSliceFlag{Name: "config", Usage: "measure this `NAME` only; may be repeated. The first is the baseline"},
			&cli.BoolFlag{Name: "dry-run", Usage: "print the plan and how long it takes, and start nothing"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: sweepTable, Usage: "`format`: table, csv or json"},
			&cli.StringFlag{Name: "out", Usage: "write the tables as CSV files into this `directory` too"},
			&cli.BoolFlag{Name: "quiet", Usage: "no progress on standard error"},
		},
		Action: func(c *cli.Context) error { return sweepAction(c, finish) },
	}
}

// The formats of --output.
const (
	sweepTable = "table"
	sweepCSV   = "csv"
	sweepJSON  = "json"
)

// sweepAction reads the command line, sweeps, and reports whatever was measured.
func sweepAction(c *cli.Context, finish <-chan struct{}) error {
	path, err := oneArg(c, "a study file with a sweep")
	if err != nil {
		return err
	}
	formats := []string{sweepTable, sweepCSV, sweepJSON}
	format := c.String("output")
	if !slices.Contains(formats, format) {
		return usage("--output %s: allowed are %s", format, strings.Join(formats, ", "))
	}
	printDocuments(c, format)
	file, err := readStudyFile(c, path)
	if err != nil {
		return err
	}
	s, err := newSweeping(file, c.StringSlice("config"))
	if err != nil {
		return err
	}
	if c.Bool("dry-run") {
		return s.writePlan(c.App.Writer)
	}
	if dir := c.String("out"); dir != "" {
		if err := plan.CheckWritable(dir); err != nil {
			return usage("--out: %w; give a folder that can be written", err)
		}
	}
	s.stderr = c.App.ErrWriter
	if c.Bool("quiet") {
		s.stderr = io.Discard
	}
	runErr := s.run(c.Context, finish, c.String("root"))
	return errors.Join(s.report(c.App.Writer, format, c.String("out")), s.outcome(runErr))
}

// A sweeping is one sweep: what is to be measured, and what has been.
type sweeping struct {
	*plan.Plan
	setup   studyfile.Sweep
	sweep   trial.Sweep
	configs []sweptConfig // in the order of the file; the first is the baseline
	stderr  io.Writer
}

// A sweptConfig is one config with what came of it.
type sweptConfig struct {
	studyfile.Config
	number int // its place in the file, from 0: names its log
	begun  bool
	done   bool // all of its levels are measured, or its server failed
	result trial.Result
	probes []trial.Probe
}

// newSweeping reads the sweep of a file. only names the configs that are wanted; none means all.
func newSweeping(file *studyfile.File, only []string) (*sweeping, error) {
	if file.Sweep == nil {
		return nil, usage("%s has no sweep; add sweep: {configs: {default: {}}, rates: [0.5, 1, 2]}, or search with `tuner run`", file.Path)
	}
	setup := *file.Sweep
	s := &sweeping{Plan: &plan.Plan{File: file}, setup: setup, sweep: sweepOf(file)}
	if err := s.choose(only); err != nil {
		return nil, err
	}
	var err error
	if s.Plan, err = plan.OpenSweep(file); err != nil {
		return nil, err
	}
	return s, s.check()
}

// sweepOf is the file's sweep as a server goes through it.
func sweepOf(file *studyfile.File) trial.Sweep {
	f := file.Sweep
	s := trial.Sweep{Requests: f.Requests, WarmUp: f.WarmUp.Requests, WarmUpRate: f.WarmUp.Rate, WarmUpCooldown: f.WarmUp.Cooldown, Cooldown: f.Cooldown}
	for _, rate := range f.Rates {
		s.Levels = append(s.Levels, trial.Level{Rate: rate})
	}
	for _, streams := range f.Concurrencies {
		s.Levels = append(s.Levels, trial.Level{Streams: streams})
	}
	if file.Server.Simulate != "" { // an idle server does nothing in virtual time
		s.Pause = func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) }
	}
	return s
}

// choose keeps the configs that are wanted.
func (s *sweeping) choose(only []string) error {
	var names []string
	for i, c := range s.setup.Configs {
		names = append(names, c.Name)
		if len(only) == 0 || slices.Contains(only, c.Name) {
			s.configs = append(s.configs, sweptConfig{Config: c, number: i})
		}
	}
	for _, name := range only {
		if name == "" {
			return usage("--config is empty; known are %s", strings.Join(names, ", "))
		}
		if !slices.Contains(names, name) {
			return usage("--config %s: %s has no such config; %s", name, s.File.Path, space.DidYouMean(name, names))
		}
	}
	return nil
}

// check finds what cannot go well for any config, before GPU time is spent.
func (s *sweeping) check() error {
	if err := workload.Enough(s.Source, s.sweep.Requests); err != nil {
		return usageError{fmt.Errorf("%s: workload: %w", s.File.Path, err)}
	}
	for _, c := range s.configs {
		if most := s.File.MaxModelLenOf(c.Config); most > 0 && s.Source.Longest() > most {
			return usage("%s: config %s: max-model-len %d is less than the workload's longest request of %d tokens; raise it", s.File.Path, c.Name, most, s.Source.Longest())
		}
	}
	return nil
}

// closed reports whether the levels are of a closed loop.
func (s *sweeping) closed() bool { return len(s.setup.Concurrencies) > 0 }

// sweepFolder is where the servers' logs are. No study can have its name.
const sweepFolder = "_sweep"

// run measures the configs one after the other. What was measured stands, whatever the error is.
func (s *sweeping) run(ctx context.Context, finish <-chan struct{}, root string) (err error) {
	dir := filepath.Join(root, s.File.Name+sweepFolder)
	if s.File.Server.Simulate == "" {
		lock, err := studies.Lock(dir)
		if err != nil {
			return err
		}
		defer lock.Close()
		if err := s.prepare(ctx, finish, dir); err != nil {
			return err
		}
	}
	start, err := starter(s.Plan, dir)
	if err != nil {
		return err
	}
	progress := newSweepProgress(s)
	defer func() { err = errors.Join(err, progress.done()) }()
	runner := &trial.Runner{
		Start: start, Source: s.Source, SLO: s.File.SLO(), Seed: s.Seed, Cache: s.setup.Cache, Marks: s.Marks(),
		Arrivals: workload.Arrivals{Burstiness: s.File.Load.Burstiness}, Natural: s.File.Workload.Output == workload.Natural,
	}
	for i := range s.configs {
		select {
		case <-finish:
			return trial.ErrInterrupted
		default:
		}
		if err := s.runConfig(ctx, runner, &s.configs[i], progress, finish); err != nil {
			return fmt.Errorf("config %s: %w", s.configs[i].Name, err)
		}
	}
	return nil
}

// prepare ends what a killed sweep left behind, looks at the machine, and brings the model near.
func (s *sweeping) prepare(ctx context.Context, finish <-chan struct{}, dir string) error {
	left, err := live.Reclaim(dir)
	if err != nil {
		return err
	}
	if left > 0 {
		fmt.Fprintf(s.stderr, "ended %s of a server that a killed sweep had left behind\n", render.Count(left, "process"))
	}
	err = s.CheckMachine(ctx, func(name, format string, args ...any) {
		if name == plan.Warning {
			warn(s.stderr, format, args...)
		}
	})
	if err != nil {
		return err
	}
	return runOptions{finish: finish, stderr: s.stderr}.prepare(ctx, s.Plan)
}

// runConfig measures one config on a server of its own.
func (s *sweeping) runConfig(ctx context.Context, runner *trial.Runner, c *sweptConfig, progress *sweepProgress, finish <-chan struct{}) error {
	c.begun = true
	progress.begin(c)
	var err error
	c.result, err = runner.Sweep(ctx, trial.Task{
		Number: c.number, Args: s.File.ConfigArgs(c.Config),
		Record: func(p trial.Probe) error {
			c.probes = append(c.probes, p)
			progress.probed(c, p)
			return nil
		},
		Progress: progress.step, Finish: finish,
	}, s.sweep)
	if err != nil {
		return err
	}
	c.done = true
	progress.ended(c)
	return nil
}

// errSweptNothing and errNoConfigKept are the outcomes of a sweep without an answer.
var (
	errSweptNothing = errors.New("no config could be measured; the table says why")
	errNoConfigKept = errors.New("no config kept the SLO at any load")
)

// outcome turns what came of the sweep into the command's error.
func (s *sweeping) outcome(err error) error {
	switch {
	case errors.Is(err, trial.ErrInterrupted), errors.Is(err, errStoppedNow), errors.Is(err, context.Canceled):
		return fmt.Errorf("the sweep was interrupted; the tables hold what was measured: %w", err)
	case err != nil:
		return err
	case !s.measuredAny():
		return errSweptNothing
	case !slices.ContainsFunc(s.configs, func(c sweptConfig) bool { return c.highest().Met() }) &&
		slices.ContainsFunc(s.configs, func(c sweptConfig) bool { return c.highest().Limited != "" }):
		return fmt.Errorf("%w in time: the load generator was late; %s", errNoConfigKept, moreCores)
	case !slices.ContainsFunc(s.configs, func(c sweptConfig) bool { return c.highest().Met() }):
		return errNoConfigKept
	}
	return nil
}

// measuredAny reports whether there is a figure at all.
func (s *sweeping) measuredAny() bool {
	return slices.ContainsFunc(s.configs, func(c sweptConfig) bool { return len(c.probes) > 0 })
}

// profileOf is the simulated server's profile; nil of a real one.
func (s *sweeping) profileOf() *sim.Profile {
	profile, err := sim.LoadProfile(s.File.Server.Simulate)
	if err != nil {
		return nil
	}
	return profile
}

// startsIn is how long a server takes to start, as far as that is known beforehand.
func (s *sweeping) startsIn() time.Duration {
	if profile := s.profileOf(); profile != nil {
		return profile.StartUp.Total()
	}
	return plan.TypicalStart
}

// writePlan says what would be done, and how long it would take.
func (s *sweeping) writePlan(w io.Writer) error {
	var t textLines
	s.writeHead(&t)
	s.writeConfigs(&t)
	each := s.startsIn() + s.sweep.Planned()
	all := each * time.Duration(len(s.configs))
	switch {
	case s.closed():
		fmt.Fprintf(&t, "\nplan: %s, a start of about %s each, then %s at each of %s:\nhow long these take, the server decides\n",
			render.Count(len(s.configs), "config"), render.Span(s.startsIn()), render.Count(s.sweep.Requests, "request"), render.Count(len(s.sweep.Levels), "concurrency"))
	default:
		fmt.Fprintf(&t, "\nplan: %s, about %s each and %s in all\n", render.Count(len(s.configs), "config"), render.Span(each), render.Span(all))
	}
	if s.File.Server.Simulate != "" {
		t.WriteString("simulated: all of it in seconds\n")
	}
	_, err := io.WriteString(w, t.String())
	return err
}
