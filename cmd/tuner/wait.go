package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/fence"
)

func waitFlag() cli.Flag {
	return &cli.DurationFlag{Name: "wait-for-owner", Usage: "while another tuner owns the study, wait up to this `time` for its end; without this flag, exit with 3 at once"}
}

func waitOf(c *cli.Context) (time.Duration, error) {
	wait := c.Duration("wait-for-owner")
	if wait < 0 {
		return 0, usage("--wait-for-owner %s: write a time such as 15m", wait)
	}
	return wait, nil
}

// ownerPause is the time between two attempts to take a study that another tuner owns.
const ownerPause = 5 * time.Second

// whenFree opens a study. While another tuner owns the study, it tries again, for the time wait at most. For example, a
// pod that was deleted finishes its probe, and the pod that follows it already runs.
func whenFree(ctx context.Context, wait time.Duration, w io.Writer, open func() (*studies.Store, error)) (*studies.Store, error) {
	for begin, told := time.Now(), false; ; told = true {
		store, err := open()
		left := wait - time.Since(begin)
		switch {
		case !errors.Is(err, studies.ErrOwned) || wait == 0:
			return store, err
		case left <= 0:
			return store, fmt.Errorf("%w; waited %s for its end", err, render.Took(wait))
		case !told:
			fmt.Fprintf(w, "%v; waiting up to %s for its end\n", err, render.Took(wait))
		}
		if err := fence.Sleep(ctx, min(ownerPause, left)); err != nil {
			return nil, err
		}
	}
}
