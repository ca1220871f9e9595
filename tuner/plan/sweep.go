package plan

import (
	"context"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/sweep"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

// OpenSweep opens the sweep of a file, with a server and a load but nothing to search. wanted lists the names of the
// configs to measure; an empty list means all configs.
func OpenSweep(file *studyfile.File, wanted []string) (*Plan, *sweep.Sweep, error) {
	if file.Sweep == nil {
		return nil, nil, inputf("%s has no sweep; add sweep: {configs: {default: {}}, rates: [0.5, 1, 2]}, or search with `tuner run`", file.Path)
	}
	configs, err := chooseConfigs(file, wanted)
	if err != nil {
		return nil, nil, err
	}
	p := newPlan(file)
	p.Load.Seed, p.Load.ITL = file.Sweep.Seed, true
	if _, err := p.open(p.openServer); err != nil {
		return nil, nil, err
	}
	s := &sweep.Sweep{
		Name: file.Name, Model: file.Model, Simulated: file.Server.Simulate, Command: file.Server.Command, Args: file.Server.Args,
		Workload: p.Load.Source.Name(), Seed: p.Load.Seed, SLO: file.SLO, Cache: file.Sweep.Cache, Plan: sweepPlan(file), StartUp: defaultStartUp(file),
		Marks: p.Marks(), Configs: configs,
	}
	return p, s, p.checkSweep(s)
}

// sweepPlan returns the warm-up and the loads that each server of the file's sweep gets.
func sweepPlan(file *studyfile.File) trial.Sweep {
	f := file.Sweep
	s := trial.Sweep{Requests: f.Requests, WarmUp: f.WarmUp.Requests, WarmUpRate: f.WarmUp.Rate, WarmUpCooldown: f.WarmUp.Cooldown, Cooldown: f.Cooldown}
	for _, rate := range f.Rates {
		s.Levels = append(s.Levels, trial.Level{Rate: rate})
	}
	for _, streams := range f.Concurrencies {
		s.Levels = append(s.Levels, trial.Level{Streams: streams})
	}
	if file.Server.Simulate != "" { // in virtual time an idle server need not wait
		s.Pause = func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) }
	}
	return s
}

// chooseConfigs returns the configs whose names are in the list wanted, or all configs if that list is empty.
func chooseConfigs(file *studyfile.File, wanted []string) (configs []*sweep.Config, err error) {
	var names []string
	for i, c := range file.Sweep.Configs {
		names = append(names, c.Name)
		if len(wanted) == 0 || slices.Contains(wanted, c.Name) {
			configs = append(configs, &sweep.Config{
				Name: c.Name, Description: c.Description, Flags: space.FlagValues(c.Args), Args: file.ConfigArgs(c), Number: i,
			})
		}
	}
	for _, name := range wanted {
		if name == "" {
			return nil, inputf("--config is empty; known are %s", strings.Join(names, ", "))
		}
		if !slices.Contains(names, name) {
			return nil, inputf("--config %s: %s has no such config; %s", name, file.Path, space.DidYouMean(name, names))
		}
	}
	return configs, nil
}

// checkSweep refuses a workload that is too short, or too long for a config, before GPU time is spent.
func (p *Plan) checkSweep(s *sweep.Sweep) error {
	if err := workload.Enough(p.Load.Source, s.Plan.Requests); err != nil {
		return inputf("%s: workload: %w", p.File.Path, err)
	}
	for _, c := range s.Configs {
		if limit := studyfile.MaxModelLen(c.Args); limit > 0 && p.Load.Source.Longest() > limit {
			return inputf("%s: config %s: max-model-len %d is less than the workload's longest request of %d tokens; raise it", p.File.Path, c.Name, limit, p.Load.Source.Longest())
		}
	}
	return nil
}

// defaultStartUp estimates the start-up time of a server. The estimate is used until a server has started.
func defaultStartUp(file *studyfile.File) time.Duration {
	if profile, err := sim.LoadProfile(file.Server.Simulate); err == nil {
		return profile.StartUp.Total()
	}
	return typicalStart
}
