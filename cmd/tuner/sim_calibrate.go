package main

import (
	"cmp"
	"fmt"
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

// defaultProfile is the profile with which a calibration begins if the study did not simulate its server.
const defaultProfile = "h200-llama70b-fp8"

func simCalibrateCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "calibrate",
		Usage:     "fit a profile of the simulator to the trials of a study",
		ArgsUsage: "STUDY",
		Description: `Makes a profile with which the simulator behaves like your own server. It
replays the study's measurements in virtual time, and changes the constants
of the simulator until both agree. This needs no GPU. Constants that the
study cannot tell apart keep their values from --from, marked as assumed.
What a study must vary: see docs/simulator.md.

Use the profile in a study file, as simulate: ./my.yaml, or with
tuner sim serve --sim-profile ./my.yaml.

STUDY is ` + studyArgument + `.

Examples:
  tuner sim calibrate llama70b -o llama70b.yaml
  tuner sim calibrate qwen -o qwen.yaml --from l4-qwen0.5b --force`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "`FILE.yaml` to write the profile to"},
			&cli.StringFlag{Name: "from", Usage: "`profile` to begin with, a name or a file (default: the one that the study simulated, or else " + defaultProfile + ")"},
			&cli.BoolFlag{Name: "force", Usage: "replace the file if it exists"},
			&cli.DurationFlag{Name: "time-limit", Value: 10 * time.Minute, Usage: "stop after this `time` with the best fit so far"},
		},
		Action: endable(finish, func(c *cli.Context) error {
			err := simCalibrate(c)
			if err != nil && c.Context.Err() != nil {
				return interruptedError("interrupted; nothing was written")
			}
			return err
		}),
	}
}

func simCalibrate(c *cli.Context) error {
	path, force := c.String("output"), c.Bool("force")
	if err := checkOutput(path, force); err != nil {
		return err
	}
	if c.Duration("time-limit") <= 0 {
		return usage("--time-limit %s: give a time above 0, such as 10m", c.Duration("time-limit"))
	}
	study, err := readStudy(c, c.App.ErrWriter, studies.ReadSnapshot)
	if err != nil {
		return err
	}
	in, err := calibrationInput(study, c.Args().First(), c.String("from"))
	if err != nil {
		return err
	}
	shown := render.NewProgress(c.App.ErrWriter).Quietly()
	in.Limit = c.Duration("time-limit")
	in.Progress = func(done, limit int) {
		shown.ShowShare(render.Done(done, limit, "replay"), float64(done)/float64(limit))
	}
	result, err := calibrate.Fit(c.Context, in)
	shown.End()
	if err != nil {
		if contains[*calibrate.InputError](err) {
			return usageError{err}
		}
		return err
	}
	if err := c.Context.Err(); err != nil {
		return err
	}
	text := result.Profile.Text()
	if _, err := sim.ParseProfile(path, []byte(text)); err != nil {
		return fmt.Errorf("the calibrated profile is not valid: %w", err)
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

// asPath returns a file's path with a slash in it, because a name without a slash means a built-in profile.
func asPath(path string) string {
	if strings.ContainsRune(path, filepath.Separator) {
		return path
	}
	return "./" + path
}

// checkOutput refuses a file that cannot be written. It runs before the calibration, which takes minutes.
func checkOutput(path string, force bool) error {
	switch {
	case path == "":
		return usage("sim calibrate needs a file for the profile, such as -o my-server.yaml")
	case filepath.Ext(path) != ".yaml" && filepath.Ext(path) != ".yml":
		return usage("-o %s: a profile's file ends in .yaml, such as %s.yaml", path, path)
	}
	return checkNew(path, force)
}

// calibrationInput opens the study's workload and prepares the replay of its probes.
func calibrationInput(study studies.Study, arg, from string) (in calibrate.Input, err error) {
	name := study.Name
	if strings.HasSuffix(arg, ".yaml") || strings.HasSuffix(arg, ".yml") {
		name = arg // paths of datasets are relative to the study file
	}
	file, err := studyfile.Parse(name, []byte(study.File))
	if err != nil {
		return in, err
	}
	switch {
	case file.Load.Driver == studyfile.VLLMBench:
		return in, usage("study %s was measured by vllm bench serve, and a replay cannot repeat its lead-in and end; calibrate to a study with load: {driver: tuner}", study.Name)
	case file.Workload.Output == workload.Natural:
		return in, usage("study %s let the model choose the lengths of its answers (output: natural), and a replay cannot know these lengths; calibrate to a study with output: pinned", study.Name)
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
		return in, usage("%s has changed since study %s was measured; restore the old file", file.WorkloadSpec().Path, study.Name)
	}
	profile, err := sim.LoadProfile(cmp.Or(from, file.Server.Simulate, defaultProfile))
	if err != nil {
		return in, usage("--from: %w", err)
	}
	return calibrate.Input{Study: study, Model: file.Model, Runner: p.Runner(), From: profile}, nil
}
