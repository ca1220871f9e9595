package main

import (
	"io"
	"math"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
)

func statusCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "status",
		Usage:     "print the progress of a study, and what each trial found",
		ArgsUsage: "STUDY",
		Description: `STUDY is ` + studyArgument + `.
Shows the ten newest trials, and always the best one. The figures are at
most a few seconds old, and reading them never disturbs the study.
With --watch the status stays up to date until the study ends, or you press
Ctrl-C to leave it.

Examples:
  tuner status llama70b --root /mnt/nfs/studies
  tuner status llama70b --all --sort best
  tuner status llama70b --watch`,
		Flags: []cli.Flag{
			rootFlag(), formatFlag(),
			&cli.BoolFlag{Name: "all", Usage: "show all trials"},
			&cli.StringFlag{Name: "sort", Value: string(report.Newest), Usage: "`order` of the trials: newest, oldest or best"},
			&cli.BoolFlag{Name: "watch", Usage: "keep the status up to date until the study ends"},
		},
		Action: onDisk(func(c *cli.Context) error {
			format, err := formatOf(c)
			if err != nil {
				return err
			}
			rows, order, err := rowsOf(c, format)
			if err != nil {
				return err
			}
			warnings := c.App.ErrWriter
			study := func() (studies.Study, error) {
				defer func() { warnings = io.Discard }() // a watched study is read often, but its warnings are shown only once
				return readSummary(c, warnings, report.Whole(rows))
			}
			options := func(study studies.Study) report.Options {
				o := reportOptions(study)
				o.Rows, o.Sort, o.Width = rows, order, render.Columns(c.App.Writer)
				return o
			}
			if c.Bool("watch") {
				return watchStudy(c, finish, study, options)
			}
			read, err := study()
			if err != nil {
				return err
			}
			switch format {
			case "json":
				return report.StatusJSON(c.App.Writer, read, options(read))
			case "yaml":
				return report.StatusYAML(c.App.Writer, read, options(read))
			}
			return report.StatusText(c.App.Writer, read, options(read))
		}),
	}
}

// rowsOf returns how many trials the table shows, and in which order; 0 rows means the default. JSON and YAML show all
// trials.
func rowsOf(c *cli.Context, format string) (rows int, order report.Order, err error) {
	order = report.Order(c.String("sort"))
	var orders []string
	for _, o := range report.Orders {
		orders = append(orders, string(o))
	}
	if err := oneOf("sort", string(order), orders...); err != nil {
		return 0, "", err
	}
	if format != "text" {
		for _, flag := range []string{"watch", "all", "sort"} {
			if c.IsSet(flag) {
				return 0, "", usage("--%s works with --output text only; %s output always has all trials, sorted by number, and is written once", flag, format)
			}
		}
	}
	if c.Bool("all") || format != "text" {
		rows = math.MaxInt
	}
	return rows, order, nil
}
