package main

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/studies/silent"
	"vllmtuner/tuner/studyfile"
)

//go:embed demo.yaml
var demoFile []byte

func demoCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "run a whole study on a simulated H200 in seconds, without a GPU",
		Description: `Runs a study in virtual time, with the code that runs real studies: 16 trials
search the flags, then 3 confirm the default and the two best choices.
A calibrated model replaces the server, so every figure is simulated.
After an interruption the same command continues the demo. After a finished
demo it begins another one and keeps the old one.

Example: tuner demo --seed 7`,
		Flags: []cli.Flag{
			rootFlagOf(demoRoot(), "$XDG_STATE_HOME/tuner/demo"),
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "`seed` of all random choices"},
			&cli.StringFlag{Name: "sampler", Value: "gp", Usage: "`sampler`, which chooses the flags to try: gp, tpe, random, sobol, halton or grid"},
			&cli.BoolFlag{Name: "print", Usage: "print the study file and do nothing"},
		},
		Action: func(c *cli.Context) error {
			if c.Bool("print") {
				_, err := c.App.Writer.Write(demoFile)
				return err
			}
			if err := oneOf("sampler", c.String("sampler"), studyfile.Samplers...); err != nil {
				return err
			}
			file, err := silent.Watch(c.Context, c.App.ErrWriter, []string{c.String("root")}, func() (*studyfile.File, error) {
				return demoStudy(c.String("root"), c.String("sampler"), c.Uint64("seed"))
			})
			if err != nil {
				return err
			}
			return runStudy(c.Context, file, runOptions{
				root: c.String("root"), finish: finish, stdout: c.App.Writer, stderr: c.App.ErrWriter, remark: besideFullTrials,
			})
		},
	}
}

// fullTrials is the GPU time in hours of 30 trials of the demo if none races (min_gain 0) and none is confirmed. It is
// the mean of BenchmarkFullTrials, whose seeds 1, 2 and 3 took 12.2, 15.3 and 14.2 hours.
const fullTrials = 13.9

// besideFullTrials compares the GPU time of a demo with the GPU time of 30 full trials.
func besideFullTrials(study studies.Study) string {
	took := report.Summarize(study, report.Options{}).GPUSeconds / time.Hour.Seconds()
	return fmt.Sprintf("This study took %s GPU-hours, simulated. 30 trials that are all measured in full would take about %s "+
		"(an estimate: the mean of three simulated studies).", render.Digits(took, 2), render.Digits(fullTrials, 2))
}

// demoRoot returns the directory of the demos. It is below XDG_STATE_HOME, where a program's state belongs.
func demoRoot() string {
	state := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(state) { // the specification says to ignore a relative path
		home, err := os.UserHomeDir()
		if err != nil { // a bare container may have no home directory
			return filepath.Join(os.TempDir(), "tuner-demo")
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "tuner", "demo")
}

// demoStudy returns the demo's study file with the given sampler and seed. The study gets the first name that is free
// or belongs to an unfinished study. If a name's directory cannot be read, for example because another version of tuner
// wrote it, the name is not free.
func demoStudy(root, sampler string, seed uint64) (*studyfile.File, error) {
	base := fmt.Sprintf("demo-%s-%d", sampler, seed)
	for n, name := 2, base; ; n++ {
		dir := filepath.Join(root, name)
		s, err := readResults(dir)
		if _, missing := os.Lstat(dir); missing == nil && (err != nil || s.State == studies.Done) {
			name = fmt.Sprintf("%s-%d", base, n)
			continue
		}
		return changedDemo(string(demoFile), name, sampler, seed)
	}
}

// changedDemo returns the demo's study file with another name, sampler and seed. It returns an error if the text does
// not have the lines that it replaces.
func changedDemo(text, name, sampler string, seed uint64) (*studyfile.File, error) {
	text = strings.NewReplacer("name: demo", "name: "+name, "{name: gp, seed: 1}", fmt.Sprintf("{name: %s, seed: %d}", sampler, seed)).Replace(text)
	file, err := studyfile.Parse("demo.yaml", []byte(text))
	if err == nil && (file.Name != name || file.Sampler.Name != sampler || file.Sampler.Seed != seed) {
		return nil, fmt.Errorf("demo.yaml: the name is %s, the sampler %s and the seed %d, want %s, %s and %d", file.Name, file.Sampler.Name, file.Sampler.Seed, name, sampler, seed)
	}
	return file, err
}
