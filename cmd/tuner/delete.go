package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/fence"
	"vllmtuner/tuner/space"
)

func deleteCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "delete",
		Usage:     "move a study to the trash",
		ArgsUsage: "STUDY",
		Description: `STUDY is ` + studyArgument + `.
Moves the study with its logs into ` + studies.TrashDir + ` beside it. Nothing is lost: move it
back to restore it, or remove it there to free the space. A running study is
not deleted: exit code 3.

Example: tuner delete llama70b --root /mnt/nfs/studies`,
		Flags: []cli.Flag{rootFlag(), takeoverFlag()},
		Action: onDisk(endable(finish, func(c *cli.Context) error {
			after, err := takeoverOf(c)
			if err != nil {
				return err
			}
			dir, err := studyDir(c)
			if err != nil {
				return err
			}
			to, err := studies.Delete(c.Context, dir, after)
			if errors.Is(err, context.Canceled) { // the user interrupted while Delete waited for the study's owner
				return interruptedError("interrupted; nothing is deleted")
			}
			if err != nil {
				return err
			}
			quoted := space.ShellWord(to)
			fmt.Fprintf(c.App.Writer, "moved to %s\nto restore it:      mv -T %s %s\nto free the space:  rm -r %s\n", to, quoted, space.ShellWord(filepath.Clean(dir)), quoted)
			return nil
		})),
	}
}

func takeoverFlag() cli.Flag {
	return &cli.DurationFlag{Name: "takeover-after", Value: fence.DefaultTTL,
		Usage: "on a shared disk, take a study over if its tuner has written nothing for this `time`; give all runs of a study the same value"}
}

func takeoverOf(c *cli.Context) (time.Duration, error) {
	after := c.Duration("takeover-after")
	if after < time.Second || after > time.Hour {
		return 0, usage("--takeover-after %s: write a time from 1s to 1h", after)
	}
	return after, nil
}
