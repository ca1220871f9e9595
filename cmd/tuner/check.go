package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

func checkCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "check a study file and everything it needs, without GPU time",
		ArgsUsage: "STUDY.yaml",
		Description: `Checks the study file, its workload, the machine, the server's binary and its
flags, the local model and the store. Then prints the plan and an estimate of
its time. It starts nothing but the server's --help.

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
			return check(ctx, c.App.Writer, file, c.String("root"), !c.Bool("skip-help"))
		},
	}
}

// check prints one line for each check that succeeds, and returns the first error.
func check(ctx context.Context, w io.Writer, file *studyfile.File, root string, askServer bool) error {
	say := func(name, format string, args ...any) {
		mark := "ok"
		if name == plan.Warning {
			mark = "!!"
		}
		head := fmt.Sprintf("%s  %-10s ", mark, name)
		fmt.Fprint(w, render.Hang(head, fmt.Sprintf(format, args...), strings.Repeat(" ", len(head)), render.DefaultWidth))
	}
	p, err := plan.Open(file)
	if err != nil {
		return err
	}
	say("study file", "%s, %s, SLO %s", file.Path, render.Count(len(file.Parameters), "parameter"), file.SLO)
	say("workload", "%s", p.Source.Name())
	if l := file.Load; l.Driver == studyfile.VLLMBench {
		say("load", "%s; its TTFT counts from the POST, and each probe runs to its end", strings.Join(l.Command, " "))
	}
	if err := p.CheckFlags(ctx, say, askServer); err != nil {
		return err
	}
	if err := p.CheckNeeds(ctx, say); err != nil {
		return err
	}
	if longest, limit := p.Source.Longest(), studyfile.MaxModelLen(file.Server.Args); longest > 0 && limit > 0 {
		say("lengths", "the longest request has %d tokens, max-model-len is %d", longest, limit)
	}
	begun, err := p.Begin(version)
	if err != nil {
		return err
	}
	say("cache", "%s", cacheText(p))
	dir := filepath.Join(root, file.Name)
	disk, err := checkStudy(ctx, dir, begun)
	if err != nil {
		return err
	}
	say("store", "%s can be written: %s", dir, diskText(disk))
	for _, text := range disk.Warnings {
		say(plan.Warning, "%s", text)
	}
	printPlan(w, p)
	return nil
}

// cacheText describes the cache protocol, and how much of its prompts a probe will find in the server's prefix cache.
func cacheText(p *plan.Plan) string {
	protocol := p.Protocol()
	state := "carried from probe to probe"
	if protocol == trial.Reset {
		state = "emptied before each probe"
	}
	found := "none"
	if share := trial.Cached(p.Probe(), protocol); share >= 0.005 {
		found = fmt.Sprintf("up to %.0f %%", 100*share)
	}
	return fmt.Sprintf("%s: the prefix cache is %s; it holds %s of a window's prompt tokens", protocol, state, found)
}

// diskText describes a study's disk: type, commit time and owners.
func diskText(d studies.Disk) string {
	return fmt.Sprintf("%s, a write takes %s; %s", d.Mount.Type, d.Commit.Round(10*time.Microsecond), d.Owners())
}

func printPlan(w io.Writer, p *plan.Plan) {
	f := p.File
	probe := f.Probe.LeadIn + p.Window()
	each := plan.TypicalStart + plan.TypicalProbes*probe
	fmt.Fprintf(w, "plan: %s by %s, cache %s, window %s; about %s per trial, %s in all",
		render.Count(f.Budget.Trials, "trial"), f.Sampler.Name, p.Protocol(), render.Span(p.Window()), render.Span(each), render.Span(each*time.Duration(f.Budget.Trials)))
	if f.Budget.GPUTime > 0 {
		fmt.Fprintf(w, " (at most %s, by budget.gpu_time)", render.Span(f.Budget.GPUTime))
	}
	fmt.Fprintln(w)
	if precision := f.Probe.Precision; precision > 0 {
		longest := plan.TypicalStart + time.Duration(f.Probe.MaxProbes)*probe
		fmt.Fprint(w, render.Paragraph(fmt.Sprintf("precision: each trial goes on until its capacity is known to ±%.3g %% (95 %% interval), for at most %d probes, about %s; "+
			"the estimate above does not include this", 100*precision, f.Probe.MaxProbes, render.Span(longest)), "  ", render.DefaultWidth))
	}
}
