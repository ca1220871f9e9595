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

// benchServerFlags say how the server is reached. What each flag does is said in benchHelp.
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

// benchWorkloadFlags say what is asked.
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

// benchLoadFlags say when it is asked, and for how long.
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

// benchReportFlags say what is made of the answers.
func benchReportFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringSliceFlag{Name: "slo"},
		&cli.StringSliceFlag{Name: "goodput"},
		&cli.BoolFlag{Name: "find-capacity"},
		&cli.Float64Flag{Name: "tolerance", Value: 0.2},
		&cli.StringFlag{Name: "precision"},
		&cli.DurationFlag{Name: "budget", Value: usualBudget},
		&cli.Float64Flag{Name: "max-rate", Value: mostRate},
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

// benchAction reads the flags, looks at the server, sends the runs, and reports each.
func benchAction(ctx context.Context, c *cli.Context) error {
	if c.Args().Present() {
		return usage("bench takes flags only, not %q; see `tuner bench --help`", c.Args().First())
	}
	b, err := newBenching(c)
	if err != nil {
		return err
	}
	out, err := newBenchReport(c, b)
	if err != nil {
		return err
	}
	if err := b.checkShort(); err != nil {
		return err
	}
	if err := b.checkFiles(host.Reader{}.Read().Limits.OpenFiles); err != nil {
		return err
	}
	if err := b.preflight(ctx); err != nil {
		return err
	}
	if err := out.begin(); err != nil {
		return err
	}
	if b.search != nil {
		return b.findCapacity(ctx, out)
	}
	return b.sweep(ctx, out)
}

// preflight finds out whether the runs make sense before the first of them.
func (b *benching) preflight(ctx context.Context) error {
	info, err := b.client.Preflight(ctx)
	if err != nil {
		return preflightError(err, b.client.Model)
	}
	b.client.Model, b.info = info.Model, info
	if info.MaxModelLen == 0 {
		return nil
	}
	uncounted, err := b.client.CheckLengths(ctx, b.requests(), info.MaxModelLen)
	if err != nil {
		return preflightError(err, b.client.Model)
	}
	if uncounted > 0 {
		fmt.Fprintf(b.stderr, "%d texts may be longer than max-model-len %d; the server cannot count them (no /tokenize, or too many)\n", uncounted, info.MaxModelLen)
	}
	return nil
}

// preflightError adds the flags that mend it. What can be mended on the command line is an error of usage.
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
			return fmt.Errorf("%w (--ca-file, --insecure)", err)
		}
	}
	return err
}
