package main

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/serverctl/sim"
	"vllmtuner/serverctl/sim/vllm"
)

func simCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:            "sim",
		HideHelpCommand: true,
		Usage:           "run the simulated vLLM server, or calibrate it",
		Action: func(c *cli.Context) error {
			if c.Args().Len() == 0 {
				return cli.ShowSubcommandHelp(c)
			}
			return noCommand("tuner sim", c.Args().First(), c.Command.Subcommands)
		},
		Subcommands: []*cli.Command{
			{
				Name:            "serve",
				Usage:           "serve a simulated model over HTTP in real time",
				ArgsUsage:       "[MODEL] [vLLM flags]",
				SkipFlagParsing: true, // its flags are vLLM's
				Description: `A vLLM without a GPU: the same flags, start-up log lines, endpoints and
metrics, with simulated figures. It takes vLLM's flags, and three of its own:

--sim-profile NAME (or TUNER_SIM_PROFILE) chooses the simulated server: ` + strings.Join(sim.ProfileNames(), ", ") + `.
--sim-version VERSION (or TUNER_SIM_VERSION) chooses the vLLM it imitates:
` + strings.Join(sim.Versions, ", ") + `.
--sim-fault KIND[:key=value,...] makes it fail as vLLM fails;
docs/simulator.md lists the kinds.

Example:
  tuner sim serve my/model --sim-profile small-fast --max-num-seqs 64`,
				Action: simAction(finish, simServe),
			},
			simCalibrateCommand(finish),
			{
				Name:            "engine", // `sim serve` starts this command, as vLLM starts its engine's process
				Hidden:          true,
				SkipFlagParsing: true,
				Action: simAction(finish, func(c *cli.Context, server *vllm.Server, args []string) error {
					return simEnd(c.Context, server.RunEngine(c.Context, args))
				}),
			},
			{
				Name:            "child", // `sim serve` starts this command for some faults
				Hidden:          true,
				SkipFlagParsing: true,
				Action:          func(c *cli.Context) error { return vllm.RunChild(c.Args().Slice()) },
			},
			{
				Name:            "nvidia-smi", // a script named nvidia-smi calls this command
				Hidden:          true,
				SkipFlagParsing: true,
				Action: simAction(finish, func(c *cli.Context, server *vllm.Server, args []string) error {
					if code := vllm.NvidiaSMI(c.Context, args, server.GPU, server.Profile.Memory.GPUGiB, c.App.Writer); code != 0 {
						return codeError(code)
					}
					return nil
				}),
			},
		},
	}
}

// simAction returns an action that calls simulate with the server that the command line describes, and with the vLLM
// args on this command line.
func simAction(finish <-chan struct{}, simulate func(*cli.Context, *vllm.Server, []string) error) cli.ActionFunc {
	return endable(finish, func(c *cli.Context) error {
		server, args, err := vllm.FromArgs(c.Args().Slice(), os.Getenv)
		if err != nil {
			return usageError{err}
		}
		server.Reexec = []string{os.Args[0], "sim"}
		server.Out, server.Err = c.App.Writer, c.App.ErrWriter
		return simulate(c, server, args)
	})
}

func simServe(c *cli.Context, server *vllm.Server, args []string) error {
	if help, ok := server.Help(args); ok {
		fmt.Fprint(c.App.Writer, help)
		return nil
	}
	return simEnd(c.Context, server.Serve(c.Context, args))
}

// simEnd turns an error of the server into the command's error. The server has already printed vLLM's message.
func simEnd(ctx context.Context, err error) error {
	if contains[*vllm.FaultError](err) {
		return usageError{err}
	}
	if err == nil || ctx.Err() != nil {
		return nil
	}
	return codeError(vllm.ExitCode(err))
}
