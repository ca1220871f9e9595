package main

import (
	"crypto/tls"
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/serverctl/host"
	"vllmtuner/trial/loadtest"
	"vllmtuner/tuner/space"
)

func benchCommand(finish <-chan struct{}) *cli.Command {
	groups := benchFlags()
	var flags []cli.Flag
	for _, group := range groups {
		for _, f := range group.flags {
			flags = append(flags, f.Flag)
		}
	}
	return &cli.Command{
		Name:               "bench",
		Usage:              "send a load to a running server and measure its answers",
		CustomHelpTemplate: benchHelp(groups),
		Flags:              flags,
		Action:             endable(finish, benchAction),
	}
}

// benchAction reads the flags, checks the server, makes the runs, and reports each run.
func benchAction(c *cli.Context) error {
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
	if err := b.Preflight(c.Context); err != nil {
		return preflightError(err, b.Client.Model)
	}
	if err := report.Begin(); err != nil {
		return benchError(err)
	}
	if b.Search != nil {
		return benchError(b.FindCapacity(c.Context, report))
	}
	return benchError(b.Sweep(c.Context, report))
}

// benchError gives a loadtest.InputError the exit code of a wrong command line.
func benchError(err error) error {
	if contains[loadtest.InputError](err) {
		return usageError{err}
	}
	return err
}

// preflightError adds to an error the names of the flags that can solve the problem. An error caused by a wrong flag
// becomes a usageError.
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
		if contains[*tls.CertificateVerificationError](err) {
			return fmt.Errorf("%w; with bench, --ca-file names the authority, and --insecure skips the check", err)
		}
	}
	return err
}
