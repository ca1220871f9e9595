package main

import (
	"math"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies/report"
)

func statusCommand() *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "print how far a study is, and what each trial found",
		ArgsUsage: "STUDY",
		Description: `STUDY is ` + studyArgument + `.
It reads a published snapshot, a few seconds old at most, and never disturbs
the study.

Example: tuner status llama70b --root /mnt/nfs/studies`,
		Flags: []cli.Flag{rootFlag(), formatFlag()},
		Action: onDisk(func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			whole := report.Whole(math.MaxInt) // as a document it has all probes
			if format == "text" {
				whole = report.Whole(0)
			}
			study, err := readSummary(c, whole)
			if err != nil {
				return err
			}
			switch format {
			case "json":
				return report.StatusJSON(c.App.Writer, study, reportOptions(study))
			case "yaml":
				return report.StatusYAML(c.App.Writer, study, reportOptions(study))
			}
			return report.StatusText(c.App.Writer, study, reportOptions(study))
		}),
	}
}
