package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"vllmtuner/tuner/studyfile"
)

func initCommand() *cli.Command {
	return &cli.Command{
		Name:        "init",
		Usage:       "print a commented study file to edit",
		Description: "Example: tuner init > study.yaml",
		Action: func(c *cli.Context) error {
			_, err := fmt.Fprint(c.App.Writer, studyfile.Template())
			return err
		},
	}
}
