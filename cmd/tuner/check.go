package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/vllmsim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

func checkCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "check",
		Usage:     "check a study file and all that it needs, without GPU time",
		ArgsUsage: "STUDY.yaml",
		Description: `Checks the study file, the workload's file, the server's binary and its own
list of flags, the local model and the store, and prints the plan with an
estimate of the time. Nothing is started but the server's --help.

Example: tuner check study.yaml`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.BoolFlag{Name: "skip-help", Usage: "do not ask the server for its flags, which takes it 10 to 60 s"},
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

// check prints one line for each thing that is well, and returns the first that is not.
func check(ctx context.Context, w io.Writer, file *studyfile.File, root string, askServer bool) error {
	say := func(what, format string, args ...any) {
		mark := "ok"
		if what == warning {
			mark = "!!"
		}
		head := fmt.Sprintf("%s  %-10s ", mark, what)
		fmt.Fprint(w, render.Hang(head, fmt.Sprintf(format, args...), strings.Repeat(" ", len(head)), render.DefaultWidth))
	}
	p, err := makePlan(file)
	if err != nil {
		return err
	}
	say("study file", "%s, %s, SLO %s", file.Path, render.Count(len(file.Parameters), "parameter"), file.SLO())
	say("workload", "%s", p.source.Name())
	if l := file.Load; l.Driver == studyfile.VLLMBench {
		say("load", "%s; its TTFT counts from the POST, and each probe runs to its end", strings.Join(l.Command, " "))
	}
	if err := p.checkFlags(ctx, say, askServer); err != nil {
		return err
	}
	if err := p.checkNeeds(ctx, say); err != nil {
		return err
	}
	if longest := p.source.Longest(); longest > 0 && file.MaxModelLen() > 0 {
		say("lengths", "the longest request has %d tokens, max-model-len is %d", longest, file.MaxModelLen())
	}
	begun, err := p.begin(ctx)
	if err != nil {
		return err
	}
	say("cache", "%s", p.cacheText())
	dir := filepath.Join(root, file.Name)
	disk, err := checkStudy(ctx, dir, begun)
	if err != nil {
		return err
	}
	say("store", "%s can be written: %s", dir, diskText(disk))
	for _, text := range disk.Warnings {
		say(warning, "%s", text)
	}
	p.printPlan(w)
	return nil
}

// cacheText says what of the prompts a probe will find in the server's prefix cache.
func (p *plan) cacheText() string {
	protocol := p.file.Protocol(p.source.Len() == 0)
	state := "carried from probe to probe"
	if protocol == trial.Reset {
		state = "emptied before each probe"
	}
	share := trial.Cached(p.probe(), protocol)
	if share < 0.005 {
		return fmt.Sprintf("%s: the prefix cache is %s; a window will find none of its prompt tokens there", protocol, state)
	}
	return fmt.Sprintf("%s: the prefix cache is %s; a window will find up to %.0f %% of its prompt tokens there", protocol, state, 100*share)
}

// diskText says what a study would be kept on.
func diskText(d studies.Disk) string {
	return fmt.Sprintf("%s, %s to the disk; %s", d.Mount.Type, d.Commit.Round(10*time.Microsecond), d.Owners())
}

// checkFlags holds the flags of the study against those that the server itself knows.
func (p *plan) checkFlags(ctx context.Context, say say, askServer bool) error {
	s := p.file.Server
	args := s.Args
	for _, point := range p.samplePoints() {
		args = append(args[:len(args):len(args)], p.space.Args(point)...)
	}
	if s.Simulate != "" {
		profile, err := vllmsim.LoadProfile(s.Simulate)
		if err != nil {
			return err
		}
		if _, err := profile.ParseArgs(args); err != nil {
			return usage("%s: the simulated server refuses: %w", p.file.Path, err)
		}
		say("server", "%s, simulated", s.Simulate)
		return nil
	}
	if refused := slices.Compact(vllmsim.RefusedValues(args)); len(refused) > 0 {
		return usage("%s: vLLM takes no such value: %s; mend it in server.args, server.current or parameters", p.file.Path, strings.Join(refused, "; "))
	}
	if !askServer {
		say("server", "%s is there; its flags were not asked for", strings.Join(s.Command, " "))
		return nil
	}
	accepted, err := serverctl.Help(ctx, s.Command, p.env)
	if err != nil {
		return fmt.Errorf("%s: server.command: %w", p.file.Path, err)
	}
	if err := serverctl.CheckFlags(accepted, args); err != nil {
		return usageError{fmt.Errorf("%s: %w", p.file.Path, err)}
	}
	say("server", "%s knows all %d flags of the study (it has %d)", strings.Join(s.Command, " "), countFlags(args), len(accepted))
	return nil
}

// samplePoints returns points that between them use every flag of the space, with both ends of each range and every choice.
// The last one has every parameter at its highest, for where the last flag counts the values must fit together.
func (p *plan) samplePoints() []space.Point {
	n := len(p.file.Parameters)
	low, high := make([]float64, n), make([]float64, n)
	for i := range high {
		high[i] = 0.999
	}
	points := []space.Point{p.space.Sample(low)}
	for _, parameter := range p.file.Parameters {
		for _, level := range p.space.Parameter(parameter.Name).Levels(2) {
			point := maps.Clone(points[0])
			point[parameter.Name] = level
			points = append(points, point)
		}
	}
	return append(points, p.space.Sample(high))
}

func countFlags(args []string) int {
	names := map[string]bool{}
	for _, a := range args {
		if name, ok := strings.CutPrefix(a, "--"); ok {
			name, _, _ = strings.Cut(name, "=")
			names[name] = true
		}
	}
	return len(names)
}

// The time of a trial beside its probes, and the probes it takes, for an estimate: a 70B model from a disk cache, and the
// mean of the search on simulated engines.
const (
	usualStart  = 150 * time.Second
	usualProbes = 4
)

// checkBudget refuses a study of which a single probe takes longer than all of its GPU time.
func (p *plan) checkBudget() error {
	f := p.file
	probe := f.Probe.LeadIn + p.window()
	if f.Budget.GPUTime <= 0 || f.Probe.StartRate == 0 || probe <= f.Budget.GPUTime { // without a rate it is not known
		return nil
	}
	least, limit := f.SLO().LeastRequests()
	return fmt.Errorf("%s: budget.gpu_time %s is less than a single probe takes: %s for %d requests (a verdict on %s takes %d), and a trial takes about %d; "+
		"raise it, lower probe.min_requests or probe.seconds, or take a lower percentile",
		f.Path, render.Span(f.Budget.GPUTime), render.Span(probe), p.requests(), limit, least, usualProbes)
}

// window is how long a probe counts at the rate where the search begins.
func (p *plan) window() time.Duration {
	f := p.file
	return max(f.Probe.Window, time.Duration(float64(f.Probe.MinRequests)/max(f.Probe.StartRate, f.Probe.MinRate)*float64(time.Second)))
}

func (p *plan) printPlan(w io.Writer) {
	f := p.file
	window := p.window()
	each := usualStart + usualProbes*(f.Probe.LeadIn+window)
	fmt.Fprintf(w, "plan: %s by %s, cache %s, window %s; about %s a trial, %s in all",
		render.Count(f.Budget.Trials, "trial"), f.Sampler.Name, f.Protocol(p.source.Len() == 0), render.Span(window), render.Span(each), render.Span(each*time.Duration(f.Budget.Trials)))
	if f.Budget.GPUTime > 0 {
		fmt.Fprintf(w, " (GPU time ends at %s)", render.Span(f.Budget.GPUTime))
	}
	fmt.Fprintln(w)
	if precision := f.Probe.Precision; precision > 0 {
		most := usualStart + time.Duration(f.Probe.MaxProbes)*(f.Probe.LeadIn+window)
		fmt.Fprint(w, render.Paragraph(fmt.Sprintf("precision: each trial goes on until its capacity is known to ±%.3g %% (95 %% interval), for %d probes at most, about %s; "+
			"the estimate above is of the bracket alone", 100*precision, f.Probe.MaxProbes, render.Span(most)), "  ", render.DefaultWidth))
	}
}
