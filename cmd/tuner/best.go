package main

import (
	"errors"
	"fmt"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/insight"
)

func bestCommand() *cli.Command {
	return &cli.Command{
		Name:      "best",
		Usage:     "print the best args found, with their evidence",
		ArgsUsage: "STUDY",
		Description: `STUDY is ` + studyArgument + `.
You can ask while the study runs, and after it was killed. Exit code 4: no
trial met the SLO (the latency limits), or none is finished yet.

Examples:
  tuner best llama70b
  tuner best llama70b -o yaml    # prints args: and env: of a Deployment
  eval "vllm serve MODEL $(tuner best llama70b --shell)"
  eval "env $(tuner best llama70b --env) vllm serve MODEL \
    $(tuner best llama70b --shell)"`,
		Flags: []cli.Flag{
			rootFlag(), formatFlag(),
			&cli.BoolFlag{Name: "shell", Usage: "print only the args, in one line for a shell"},
			&cli.BoolFlag{Name: "env", Usage: "print only the environment variables, in one line for a shell"},
		},
		Action: onDisk(func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			study, err := readSummary(c, c.App.ErrWriter, insight.Whole)
			if err != nil {
				return err
			}
			if c.Bool("shell") && c.Bool("env") {
				return usage("--shell and --env print one line each; ask for them one by one")
			}
			if err := printBest(c, study, format); err != nil && !errors.Is(err, report.ErrNothingMet) {
				return err
			}
			best, met := report.Best(study)
			if !met {
				return unmetError(report.Unmet(study))
			}
			if c.Bool("shell") && len(best.Trial.Point.Env()) > 0 {
				fmt.Fprintf(c.App.ErrWriter, "note: these args are not all of the best settings: `tuner best --env` prints the environment variables\n")
			}
			if c.Bool("shell") || c.Bool("env") { // the other formats print these notes themselves
				for _, note := range report.Outdated(study, best) {
					fmt.Fprintf(c.App.ErrWriter, "note: %s\n", note)
				}
			}
			return nil
		}),
	}
}

func printBest(c *cli.Context, study studies.Study, format string) error {
	if c.Bool("shell") {
		return report.BestShell(c.App.Writer, study)
	}
	if c.Bool("env") {
		return report.BestEnv(c.App.Writer, study)
	}
	o := bestOptions(study, c.App.Writer)
	switch format {
	case "json":
		return report.BestJSON(c.App.Writer, study, o)
	case "yaml":
		return report.BestYAML(c.App.Writer, study, o)
	}
	return report.BestText(c.App.Writer, study, o)
}
