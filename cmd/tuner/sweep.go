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
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/sweep"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

func sweepCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "sweep",
		Usage:     "measure named configs at a list of rates, without a search",
		ArgsUsage: "STUDY.yaml",
		Description: `For each config in the file's section sweep, it starts a server, warms it up,
and measures it at each rate or concurrency, the lowest first. It prints
tables of p99 latencies, and which rates keep the SLO (the latency limits).
If a config cannot start, its row says why. Simulated servers take seconds
and no GPU (server.simulate).
Press Ctrl-C once to finish the current rate and stop, twice to stop at once.
The tables then show the rates that were measured.

Examples:
  tuner sweep docs/examples/phase1.yaml
  tuner sweep sweep.yaml --dry-run
  tuner sweep sweep.yaml --config phase0,phase1-moderate --out results

Exit codes: 0 done; 1 no config could be measured, or something went wrong;
2 the file or the command line is wrong; 4 no config kept the SLO at any
rate; 130 interrupted. See docs/sweep.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringSliceFlag{Name: "config", Usage: "measure only the config `NAME`; may be repeated; the first one is the baseline"},
			&cli.BoolFlag{Name: "dry-run", Usage: "print the plan and how long it will take; start nothing"},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: sweepTable, Usage: "`format` of the output: table, csv or json"},
			&cli.StringFlag{Name: "out", Usage: "also write the tables into this `directory`, as CSV files"},
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

// sweepAction reads the command line, sweeps, and reports the measurements, also after an error.
func sweepAction(c *cli.Context, finish <-chan struct{}) error {
	path, err := oneArg(c, "a study file with a sweep")
	if err != nil {
		return err
	}
	format := c.String("output")
	if err := oneOf("output", format, sweepTable, sweepCSV, sweepJSON); err != nil {
		return err
	}
	printDocuments(c, format)
	file, err := readStudyFile(c, path)
	if err != nil {
		return err
	}
	r, err := newSweepRun(file, c.StringSlice("config"))
	if err != nil {
		return err
	}
	if c.Bool("dry-run") {
		return r.sweep.WritePlan(c.App.Writer)
	}
	if dir := c.String("out"); dir != "" {
		if err := plan.CheckWritable(dir); err != nil {
			return usage("--out: %w; name a directory that can be written", err)
		}
	}
	r.stderr = c.App.ErrWriter
	if c.Bool("quiet") {
		r.stderr = io.Discard
	}
	err = r.measure(c.Context, finish, c.String("root"))
	switch {
	case errors.Is(err, trial.ErrInterrupted), errors.Is(err, errStoppedNow), errors.Is(err, context.Canceled):
		err = fmt.Errorf("the sweep was interrupted; the tables hold what was measured: %w", err)
	case err == nil:
		err = r.sweep.Report().Outcome()
	}
	return errors.Join(reportSweep(r.sweep, c.App.Writer, format, c.String("out")), err)
}

// reportSweep writes the measurements in the given format. If dir is not empty, it also writes them as files into dir.
func reportSweep(s *sweep.Sweep, w io.Writer, format, dir string) error {
	if !s.Begun() {
		return nil
	}
	report := s.Report()
	write := map[string]func(io.Writer) error{sweepTable: report.WriteText, sweepCSV: report.WriteCSV, sweepJSON: report.WriteJSON}[format]
	if err := write(w); err != nil || dir == "" {
		return err
	}
	return report.WriteFiles(dir)
}

// A sweepRun is a sweep with the plan of its servers.
type sweepRun struct {
	*plan.Plan
	sweep  *sweep.Sweep
	stderr io.Writer
}

// newSweepRun reads the sweep of a file. only names the configs to measure; an empty list means all configs.
func newSweepRun(file *studyfile.File, only []string) (*sweepRun, error) {
	if file.Sweep == nil {
		return nil, usage("%s has no sweep; add sweep: {configs: {default: {}}, rates: [0.5, 1, 2]}, or search with `tuner run`", file.Path)
	}
	configs, err := chooseConfigs(file, only)
	if err != nil {
		return nil, err
	}
	p, err := plan.OpenSweep(file)
	if err != nil {
		return nil, err
	}
	r := &sweepRun{Plan: p}
	r.sweep = &sweep.Sweep{
		Name: file.Name, Model: file.Model, Simulated: file.Server.Simulate, Command: file.Server.Command, Args: file.Server.Args,
		Workload: r.Load.Source.Name(), Seed: r.Load.Seed, SLO: file.SLO, Cache: file.Sweep.Cache, Plan: sweepPlan(file), StartUp: defaultStartUp(file),
		Marks: r.Marks(), Configs: configs,
	}
	return r, r.check()
}

// sweepPlan returns the warm-up and the loads that each server of the file's sweep gets.
func sweepPlan(file *studyfile.File) trial.Sweep {
	f := file.Sweep
	s := trial.Sweep{Requests: f.Requests, WarmUp: f.WarmUp.Requests, WarmUpRate: f.WarmUp.Rate, WarmUpCooldown: f.WarmUp.Cooldown, Cooldown: f.Cooldown}
	for _, rate := range f.Rates {
		s.Levels = append(s.Levels, trial.Level{Rate: rate})
	}
	for _, streams := range f.Concurrencies {
		s.Levels = append(s.Levels, trial.Level{Streams: streams})
	}
	if file.Server.Simulate != "" { // in virtual time an idle server need not wait
		s.Pause = func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) }
	}
	return s
}

// chooseConfigs returns the configs named in only, or all configs if only is empty.
func chooseConfigs(file *studyfile.File, only []string) (configs []*sweep.Config, err error) {
	var names []string
	for i, c := range file.Sweep.Configs {
		names = append(names, c.Name)
		if len(only) == 0 || slices.Contains(only, c.Name) {
			configs = append(configs, &sweep.Config{
				Name: c.Name, Description: c.Description, Flags: space.FlagValues(c.Args), Args: file.ConfigArgs(c), Number: i,
			})
		}
	}
	for _, name := range only {
		if name == "" {
			return nil, usage("--config is empty; known are %s", strings.Join(names, ", "))
		}
		if !slices.Contains(names, name) {
			return nil, usage("--config %s: %s has no such config; %s", name, file.Path, space.DidYouMean(name, names))
		}
	}
	return configs, nil
}

// check refuses a workload that is too short, or too long for a config, before GPU time is spent.
func (r *sweepRun) check() error {
	if err := workload.Enough(r.Load.Source, r.sweep.Plan.Requests); err != nil {
		return usage("%s: workload: %w", r.File.Path, err)
	}
	for _, c := range r.sweep.Configs {
		if limit := studyfile.MaxModelLen(c.Args); limit > 0 && r.Load.Source.Longest() > limit {
			return usage("%s: config %s: max-model-len %d is less than the workload's longest request of %d tokens; raise it", r.File.Path, c.Name, limit, r.Load.Source.Longest())
		}
	}
	return nil
}

// defaultStartUp estimates the start-up time of a server. The estimate is used until a server has started.
func defaultStartUp(file *studyfile.File) time.Duration {
	if profile, err := sim.LoadProfile(file.Server.Simulate); err == nil {
		return profile.StartUp.Total()
	}
	return plan.TypicalStart
}

// sweepFolder is the suffix of the directory with the servers' logs. No study can have such a name, because of the
// underscore.
const sweepFolder = "_sweep"

// measure measures the configs. The sweep keeps all measurements made before an error.
func (r *sweepRun) measure(ctx context.Context, finish <-chan struct{}, root string) error {
	dir := filepath.Join(root, r.File.Name+sweepFolder)
	if r.File.Server.Simulate == "" {
		lock, err := studies.Lock(dir)
		if err != nil {
			return err
		}
		defer lock.Close()
		if err := r.prepare(ctx, finish, dir); err != nil {
			return err
		}
	}
	start, err := starter(r.Plan, dir)
	if err != nil {
		return err
	}
	return r.sweep.Measure(ctx, &trial.Runner{
		Start: start, Source: r.Load.Source, SLO: r.sweep.SLO, Seed: r.Load.Seed, Cache: r.sweep.Cache, Marks: r.sweep.Marks,
		Arrivals: workload.Arrivals{Burstiness: r.File.Load.Burstiness}, Natural: r.File.Workload.Output == workload.Natural,
	}, finish, r.stderr)
}

// prepare ends the processes that a killed sweep left, checks the machine, and makes the model ready to load.
func (r *sweepRun) prepare(ctx context.Context, finish <-chan struct{}, dir string) error {
	if err := reclaim(dir, "sweep", r.stderr); err != nil {
		return err
	}
	if err := r.Machine.Check(ctx, warnings(r.stderr)); err != nil {
		return err
	}
	return runOptions{finish: finish, stderr: r.stderr}.prepare(ctx, r.Plan)
}
