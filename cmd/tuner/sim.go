package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/serverctl/vllmsim"
)

func simCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:  "sim",
		Usage: "the simulated vLLM server",
		Subcommands: []*cli.Command{{
			Name:            "serve",
			Usage:           "serve a simulated model over HTTP in real time",
			ArgsUsage:       "[MODEL] [vLLM flags]",
			SkipFlagParsing: true, // its flags are vLLM's
			Description: `A vLLM without a GPU: the same flags, start-up log lines, endpoints and
metrics. Every figure is simulated. --sim-profile NAME (or TUNER_SIM_PROFILE)
chooses what is simulated: ` + strings.Join(vllmsim.ProfileNames(), ", ") + `.

Example:
  tuner sim serve my/model --sim-profile small-fast --max-num-seqs 64`,
			Action: func(c *cli.Context) error { return simServe(c, finish) },
		}},
	}
}

func simServe(c *cli.Context, finish <-chan struct{}) error {
	args := c.Args().Slice()
	name, args := simProfile(args)
	profile, err := vllmsim.LoadProfile(name)
	if err != nil {
		return usageError{err}
	}
	if slices.ContainsFunc(args, func(a string) bool { return a == "--help" || strings.HasPrefix(a, "--help=") }) {
		fmt.Fprint(c.App.Writer, vllmsim.Help())
		return nil
	}
	ctx, cancel := orderly(c.Context, finish)
	defer cancel()
	err = profile.Serve(ctx, args, c.App.Writer)
	if err == nil || ctx.Err() != nil {
		return nil
	}
	fmt.Fprintln(c.App.ErrWriter, err) // as vLLM writes it, without our name before it
	return codeError(vllmsim.ExitCode(err))
}

// simProfile takes our own flag out of vLLM's.
func simProfile(args []string) (name string, rest []string) {
	name = os.Getenv("TUNER_SIM_PROFILE")
	for i := 0; i < len(args); i++ {
		value, inline := strings.CutPrefix(args[i], "--sim-profile=")
		switch {
		case inline:
			name = value
		case args[i] == "--sim-profile" && i+1 < len(args):
			i++
			name = args[i]
		default:
			rest = append(rest, args[i])
		}
	}
	if name == "" {
		name = "h200-llama70b-fp8"
	}
	return name, rest
}
