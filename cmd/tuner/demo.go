package main

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/silent"
	"vllmtuner/tuner/studyfile"
)

//go:embed demo.yaml
var demoFile []byte

func demoCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:  "demo",
		Usage: "run a whole study on a simulated H200, in seconds and without a GPU",
		Description: `Thirty trials on a simulated H200 in virtual time: the same code as a real
study, with the server replaced by a calibrated model of it. Every figure is
simulated. A demo that was interrupted goes on; a finished one begins anew
beside it.

Example: tuner demo --seed 7`,
		Flags: []cli.Flag{
			rootFlagOf(demoRoot(), "$XDG_STATE_HOME/tuner/demo"),
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "`seed` of points, requests and arrivals"},
			&cli.StringFlag{Name: "sampler", Value: "tpe", Usage: "`sampler`: tpe, random or grid"},
			&cli.BoolFlag{Name: "print", Usage: "print the study file and do nothing"},
		},
		Action: func(c *cli.Context) error {
			if c.Bool("print") {
				_, err := c.App.Writer.Write(demoFile)
				return err
			}
			file, err := silent.Watch(c.Context, c.App.ErrWriter, []string{c.String("root")}, func() (*studyfile.File, error) {
				return demoStudy(c.String("root"), c.String("sampler"), c.Uint64("seed"))
			})
			if err != nil {
				return err
			}
			return runStudy(c.Context, file, runOptions{
				root: c.String("root"), finish: finish, stdout: c.App.Writer, stderr: c.App.ErrWriter,
			})
		},
	}
}

// demoRoot is where demos are kept: what a program remembers belongs below XDG_STATE_HOME, and nothing into the directory that the user
// happens to be in.
func demoRoot() string {
	state := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(state) { // the specification has relative ones ignored
		home, err := os.UserHomeDir()
		if err != nil { // such as in a bare container
			return filepath.Join(os.TempDir(), "tuner-demo")
		}
		state = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(state, "tuner", "demo")
}

// demoStudy is the demo's study file with another sampler and seed, under the first name whose study is not finished.
func demoStudy(root, sampler string, seed uint64) (*studyfile.File, error) {
	base := fmt.Sprintf("demo-%s-%d", sampler, seed)
	for n, name := 2, base; ; n++ {
		if s, err := readNone(filepath.Join(root, name)); err == nil && s.State == studies.Done {
			name = fmt.Sprintf("%s-%d", base, n)
			continue
		}
		text := strings.NewReplacer("name: demo", "name: "+name, "{name: tpe, seed: 1}", fmt.Sprintf("{name: %s, seed: %d}", sampler, seed)).
			Replace(string(demoFile))
		return studyfile.Parse("demo.yaml", []byte(text))
	}
}
