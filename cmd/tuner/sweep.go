package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/sweep"
	"vllmtuner/tuner/plan"
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
2 the file or the command line is wrong; 3 another sweep of this file runs;
4 no config kept the SLO at any rate; 130 interrupted. See docs/sweep.md.`,
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
	p, s, err := plan.OpenSweep(file, c.StringSlice("config"))
	if err != nil {
		return err
	}
	r := &sweepRun{Plan: p, sweep: s}
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
