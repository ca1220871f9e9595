package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/host"
	"vllmtuner/trial"
	"vllmtuner/trial/loadtest"
	"vllmtuner/tuner/space"
)

func benchCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:               "bench",
		Usage:              "send a load to a running server and measure its answers",
		CustomHelpTemplate: benchHelp,
		Flags:              slices.Concat(benchServerFlags(), benchWorkloadFlags(), benchLoadFlags(), benchReportFlags()),
		Action: func(c *cli.Context) error {
			ctx, cancel := orderly(c.Context, finish)
			defer cancel()
			return benchAction(ctx, c)
		},
	}
}

// benchServerFlags returns the flags that say how to reach the server. benchHelp explains the flags of all groups.
func benchServerFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "url"},
		&cli.StringFlag{Name: "model"},
		&cli.StringFlag{Name: "endpoint", Value: workload.Completions},
		&cli.StringFlag{Name: "api-key-file"},
		&cli.GenericFlag{Name: "header", Value: new(headerFlag)},
		&cli.StringFlag{Name: "ca-file"},
		&cli.BoolFlag{Name: "insecure"},
		&cli.StringFlag{Name: "proxy"},
		&cli.DurationFlag{Name: "idle-timeout", Value: time.Minute},
		&cli.DurationFlag{Name: "answer-limit", Value: 10 * time.Minute},
	}
}

// benchWorkloadFlags returns the flags that say which requests are sent.
func benchWorkloadFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "workload", Value: "random"},
		&cli.StringFlag{Name: "path"},
		&cli.StringFlag{Name: "layout"},
		&cli.IntFlag{Name: "input-tokens"},
		&cli.IntFlag{Name: "output-tokens"},
		&cli.Float64Flag{Name: "range-ratio"},
		&cli.IntFlag{Name: "prefix-tokens"},
		&cli.IntFlag{Name: "prefixes"},
		&cli.IntFlag{Name: "suffix-tokens"},
		&cli.Float64Flag{Name: "hit-percent"},
		&cli.IntFlag{Name: "groups"},
		&cli.IntFlag{Name: "vocab-size"},
		&cli.StringFlag{Name: "repeat"},
		&cli.BoolFlag{Name: "skip-bad-rows"},
		&cli.BoolFlag{Name: "natural"},
		&cli.Uint64Flag{Name: "seed", Value: 1},
	}
}

// benchLoadFlags returns the flags that say when requests are sent, and for how long.
func benchLoadFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "rate"},
		&cli.StringSliceFlag{Name: "concurrency"},
		&cli.IntFlag{Name: "max-concurrency"},
		&cli.StringFlag{Name: "arrivals", Value: "poisson"},
		&cli.Float64Flag{Name: "burstiness", Value: 1},
		&cli.StringFlag{Name: "trace"},
		&cli.Float64Flag{Name: "speed", Value: 1},
		&cli.BoolFlag{Name: "rescale"},
		&cli.StringFlag{Name: "ramp-up"},
		&cli.Float64Flag{Name: "ramp-from"},
		&cli.Float64Flag{Name: "ramp-to"},
		&cli.BoolFlag{Name: "live"},
		&cli.DurationFlag{Name: "think-time", Value: 5 * time.Second},
		&cli.IntFlag{Name: "requests"},
		&cli.Float64Flag{Name: "seconds"},
		&cli.DurationFlag{Name: "lead-in", Value: 5 * time.Second},
		&cli.BoolFlag{Name: "no-run-out"},
		&cli.BoolFlag{Name: "reset-cache"},
	}
}

// benchReportFlags returns the flags that say how the answers are judged and reported.
func benchReportFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "slo"},
		&cli.StringSliceFlag{Name: "goodput"},
		&cli.BoolFlag{Name: "find-capacity"},
		&cli.Float64Flag{Name: "tolerance", Value: 0.2},
		&cli.StringFlag{Name: "precision"},
		&cli.DurationFlag{Name: "budget", Value: defaultBudget},
		&cli.Float64Flag{Name: "max-rate", Value: maxRate},
		&cli.Float64Flag{Name: "margin", Value: trial.DefaultMargin},
		&cli.BoolFlag{Name: "no-prime"},
		&cli.StringFlag{Name: "rules", Value: string(bench.Rules033)},
		&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "text"},
		&cli.StringFlag{Name: "result-file"},
		&cli.BoolFlag{Name: "append"},
		&cli.BoolFlag{Name: "detailed"},
		&cli.StringSliceFlag{Name: "metadata"},
		&cli.BoolFlag{Name: "quiet"},
	}
}

// benchAction reads the flags, checks the server, makes the runs, and reports each run.
func benchAction(ctx context.Context, c *cli.Context) error {
	if c.Args().Present() {
		return usage("bench takes flags only, not %q; see `tuner bench --help`", c.Args().First())
	}
	b, err := newBench(c)
	if err != nil {
		return err
	}
	report, err := newBenchReport(c, b)
	if err != nil {
		return err
	}
	if err := checkRequests(b); err != nil {
		return err
	}
	if err := checkOpenFiles(b, host.Reader{}.Read().Limits.OpenFiles); err != nil {
		return err
	}
	if err := b.Preflight(ctx); err != nil {
		return preflightError(err, b.Client.Model)
	}
	if err := report.Begin(); err != nil {
		return benchError(err)
	}
	if b.Search != nil {
		return benchError(b.FindCapacity(ctx, report))
	}
	return benchError(b.Sweep(ctx, report))
}

// benchError gives a loadtest.InputError the exit code of a wrong command line.
func benchError(err error) error {
	if _, ok := errors.AsType[loadtest.InputError](err); ok {
		return usageError{err}
	}
	return err
}

// preflightError adds to an error the flags that cure it. An error caused by a wrong flag becomes a usageError.
func preflightError(err error, model string) error {
	found, ok := errors.AsType[*bench.PreflightError](err)
	if !ok {
		return err
	}
	switch found.Trouble {
	case bench.WrongModel:
		return usage("%w; --model: %s", err, space.DidYouMean(model, found.Served))
	case bench.TooLong:
		return usageError{err}
	case bench.Unauthorized:
		return fmt.Errorf("%w; or use --api-key-file", err)
	case bench.Unreachable:
		if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
			return fmt.Errorf("%w; with bench, --ca-file names the authority, and --insecure skips the check", err)
		}
	}
	return err
}
