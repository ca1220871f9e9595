package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

func checkCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "check a study file and everything it needs, without GPU time",
		ArgsUsage: "STUDY.yaml",
		Description: `Checks the study file, its workload, the machine, the server's binary and its
flags, the local model and the disk for studies. Then it prints the plan, and
how long the study will take. It starts no server: it only asks the server's
command for its --help. If the study has the sampler ask, it starts that
program too.

Example: tuner check study.yaml`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.BoolFlag{Name: "skip-help", Usage: "do not ask the server for its flags; saves 10 to 60 s"},
		},
		Action: func(c *cli.Context) error {
			path, err := oneArg(c, "a study file")
			if err != nil {
				return err
			}
			file, err := readStudyFile(c, path)
			if err != nil {
				return err
			}
			ctx, cancel := orderly(c.Context, finish)
			defer cancel()
			return check(ctx, c.App.Writer, c.App.ErrWriter, file, c.String("root"), !c.Bool("skip-help"))
		},
	}
}

// check prints one line for each check that succeeds, and returns the first error.
func check(ctx context.Context, w, stderr io.Writer, file *studyfile.File, root string, askServer bool) error {
	width := render.Columns(w)
	say := func(name, format string, args ...any) {
		mark := "ok"
		if name == plan.Warning {
			mark = "!!"
		}
		line := render.Text{Width: width, NameWidth: len("ok  study file ")}
		line.Item(mark+"  "+name, format, args...)
		fmt.Fprint(w, line.String())
	}
	p, err := plan.Open(file)
	if err != nil {
		return err
	}
	say("study file", "%s, %s, SLO %s", file.Path, render.Count(len(file.Parameters), "parameter"), file.SLO)
	say("workload", "%s", p.Load.Source.Name())
	if l := file.Load; l.Driver == studyfile.VLLMBench {
		say("load", "%s; its TTFT counts from the POST, and each probe runs to its end", strings.Join(l.Command, " "))
	}
	if err := checkOptimiser(ctx, p, stderr, say); err != nil {
		return err
	}
	if err := p.CheckFlags(ctx, say, askServer); err != nil {
		return err
	}
	if err := p.CheckNeeds(ctx, say); err != nil {
		return err
	}
	if longest, limit := p.Load.Source.Longest(), studyfile.MaxModelLen(file.Server.Args); longest > 0 && limit > 0 {
		say("lengths", "the longest request has %d tokens, max-model-len is %d", longest, limit)
	}
	begun, err := p.Begin(version)
	if err != nil {
		return err
	}
	say("cache", "%s", p.Load.CacheText())
	dir := filepath.Join(root, file.Name)
	disk, err := checkStudy(ctx, dir, begun)
	if err != nil {
		return err
	}
	say("store", "%s can be written: %s", dir, diskText(disk))
	for _, text := range disk.Warnings {
		say(plan.Warning, "%s", text)
	}
	_, err = io.WriteString(w, p.Text(width))
	return err
}

// diskText describes a study's disk: type, commit time and owners.
func diskText(d studies.Disk) string {
	return fmt.Sprintf("%s, a write takes %s; %s", d.Mount.Type, render.Took(d.Commit), d.Owners())
}
