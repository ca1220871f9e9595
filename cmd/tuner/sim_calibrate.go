package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/tuner/calibrate"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

// usualProfile is where a calibration begins whose study was not simulated.
const usualProfile = "h200-llama70b-fp8"

func simCalibrateCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "calibrate",
		Usage:     "fit a profile of the simulator to the trials of a study",
		ArgsUsage: "STUDY",
		Description: `Replays the study's probes in virtual time and fits the constants of the
simulator to what was measured, so that your own server can be simulated:
simulate: ./my.yaml in a study file, or tuner sim serve --sim-profile
./my.yaml. Constants that the study does not tell apart keep the values of
--from and are marked as assumed. No GPU is needed. docs/simulator.md says
what a study must vary.

STUDY is ` + studyArgument + `.

Examples:
  tuner sim calibrate llama70b -o llama70b.yaml
  tuner sim calibrate qwen -o qwen.yaml --from l4-qwen0.5b --force`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FILE.yaml` to write the profile to"},
			&cli.StringFlag{Name: "from", Usage: "`profile` to begin with, a name or a file; without: what the study simulated, or " + usualProfile},
			&cli.BoolFlag{Name: "force", Usage: "replace the file if it is there"},
			&cli.DurationFlag{Name: "time-limit", Value: 10 * time.Minute, Usage: "take the best that was found after this `time`"},
		},
		OnUsageError: wrongFlag,
		Action: func(c *cli.Context) error {
			ctx, cancel := orderly(c.Context, finish)
			defer cancel()
			err := simCalibrate(ctx, c)
			if err != nil && ctx.Err() != nil {
				return interruptedError("interrupted; nothing was written")
			}
			return err
		},
	}
}

func simCalibrate(ctx context.Context, c *cli.Context) error {
	path, force := c.String("output"), c.Bool("force")
	if err := checkOutput(path, force); err != nil {
		return err
	}
	if c.Duration("time-limit") <= 0 {
		return usage("--time-limit %s: give a time above 0, such as 10m", c.Duration("time-limit"))
	}
	study, err := readStudy(c)
	if err != nil {
		return err
	}
	in, err := calibrationInput(study, c.Args().First(), c.String("from"))
	if err != nil {
		return err
	}
	progress := newReplayProgress(c.App.ErrWriter)
	in.Limit, in.Progress = c.Duration("time-limit"), progress.tell
	result, err := calibrate.Fit(ctx, in)
	if err := errors.Join(err, progress.done()); err != nil {
		if _, isUsers := errors.AsType[*calibrate.InputError](err); isUsers {
			return usageError{err}
		}
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	text := result.Profile.Text()
	if _, err := sim.ParseProfile(path, []byte(text)); err != nil {
		return fmt.Errorf("the calibrated profile is no profile: %w", err)
	}
	if err := writeNew(path, force, func(temp string) error { return os.WriteFile(temp, []byte(text), 0o644) }); err != nil {
		return err
	}
	if err := result.WriteText(c.App.Writer); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "\nThe profile is in %s\nIn a study file: server: {simulate: %s}\nOver HTTP:       tuner sim serve --sim-profile %[2]s\n", path, asPath(path))
	return err
}

// asPath is a file's name as it is known to be one wherever a profile is named.
func asPath(path string) string {
	if strings.ContainsRune(path, filepath.Separator) {
		return path
	}
	return "./" + path
}

// checkOutput refuses a file that cannot be written, before there is anything to write.
func checkOutput(path string, force bool) error {
	switch {
	case path == "":
		return usage("sim calibrate: say where the profile goes: -o my-server.yaml")
	case filepath.Ext(path) != ".yaml" && filepath.Ext(path) != ".yml":
		return usage("-o %s: a profile's file ends in .yaml, such as %s.yaml", path, path)
	}
	return checkNew(path, force)
}

// calibrationInput opens what the study measured: its workload, and how its probes were made.
func calibrationInput(study studies.Study, arg, from string) (in calibrate.Input, err error) {
	name := study.Name
	if strings.HasSuffix(arg, ".yaml") || strings.HasSuffix(arg, ".yml") {
		name = arg // datasets are beside the file
	}
	file, err := studyfile.Parse(name, []byte(study.File))
	if err != nil {
		return in, err
	}
	switch {
	case file.Load.Driver == studyfile.VLLMBench:
		return in, usage("study %s was measured by vllm bench serve, whose lead-in and end are others than a replay's; calibrate to a study with load: {driver: tuner}", study.Name)
	case file.Workload.Output == workload.Natural:
		return in, usage("study %s let answers end where the model ends them (output: natural), so that no replay knows how long they were; calibrate to a study with output: pinned", study.Name)
	}
	p, err := plan.OpenWorkload(file)
	if err != nil {
		return in, usage("study %s: %w; name the study by its study file, so that a dataset beside that file is found", study.Name, err)
	}
	world, err := p.World()
	if err != nil {
		return in, usageError{err}
	}
	if was := study.World[plan.Dataset]; was != "" && world[plan.Dataset] != was {
		return in, usage("%s is not what study %s was measured with: its contents changed; bring the old file back", file.WorkloadSpec().Path, study.Name)
	}
	profile, err := sim.LoadProfile(cmp.Or(from, file.Server.Simulate, usualProfile))
	if err != nil {
		return in, usage("--from: %w", err)
	}
	return calibrate.Input{Study: study, Model: file.Model, Runner: *p.Runner(), From: profile}, nil
}

// A replayProgress tells how far a calibration is: in the last line of a terminal, else in a line now and then.
type replayProgress struct {
	shown *render.Progress
	began time.Time
}

func newReplayProgress(w io.Writer) *replayProgress {
	return &replayProgress{shown: render.NewProgress(w).Quietly(), began: time.Now()}
}

// tell is told after each replay; most is how many there may be in all.
func (p *replayProgress) tell(done, most int) {
	left := time.Since(p.began) / time.Duration(done) * time.Duration(most-done)
	p.shown.Show(render.Stage{Head: render.Done(done, most, "replay"), Share: float64(done) / float64(most), Until: render.After(left)})
}

// done takes the last line away.
func (p *replayProgress) done() error {
	p.shown.End()
	return nil
}
