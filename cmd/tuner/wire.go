package main

import (
	"cmp"
	"context"
	"os"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/live"
	"vllmtuner/trial/simload"
	"vllmtuner/tuner"
	"vllmtuner/tuner/forecast"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

// starter returns the function that starts the plan's servers. Simulated servers run in virtual time. Real servers keep
// their files in dir.
func starter(p *plan.Plan, dir string) (trial.Start, error) {
	if name := p.File.Server.Simulate; name != "" {
		profile, err := sim.LoadProfile(name)
		if err != nil {
			return nil, err
		}
		rig := &simload.Rig{Profile: profile, ITL: p.Load.NeedsITL()}
		return rig.Start, nil
	}
	rig := liveRig(p, dir)
	return func(ctx context.Context, launch trial.Launch) (trial.Server, trial.Load, error) {
		server, load, err := rig.Start(ctx, launch)
		if contains[*bench.PreflightError](err) {
			err = usage("%s: workload: %w", p.File.Path, err)
		}
		return server, load, err
	}, nil
}

func liveRig(p *plan.Plan, dir string) *live.Rig {
	const keyVariable = "VLLM_API_KEY" // vLLM reads its key from this variable
	s := p.File.Server
	rig := &live.Rig{
		Dir: dir, Source: p.Load.Source,
		Server: serverctl.Config{
			Command: s.Command, Model: p.Server.Model, Env: p.Server.Env, Unset: p.Search.Variables(), Port: s.Port,
			APIKey: cmp.Or(p.Server.Env[keyVariable], os.Getenv(keyVariable)), Secrets: p.File.Secrets(os.LookupEnv),
			StartTimeout: s.StartTimeout, StopTimeout: s.StopTimeout, HangTimeout: s.HangTimeout,
			GPU: plan.GPUSource(s), GPUMemoryTimeout: s.GPUMemoryTimeout,
		},
		Request: live.Request{
			Endpoint: p.File.Workload.Endpoint, ITL: p.Load.NeedsITL(), Natural: p.File.Workload.Output == workload.Natural, Burstiness: p.File.Load.Burstiness,
		},
	}
	if p.File.Load.Driver == studyfile.VLLMBench {
		rig.Bench = p.File.Load.Command
	}
	return rig
}

// studyOf builds a study from its plan and its store.
func studyOf(p *plan.Plan, store *studies.Store, o runOptions, observe func(tuner.Event)) (*tuner.Study, error) {
	runner := p.Runner()
	var err error
	if runner.Start, err = starter(p, store.Dir()); err != nil {
		return nil, err
	}
	predict, err := predictor(p)
	if err != nil {
		return nil, err
	}
	return &tuner.Study{
		Store: store, Runner: runner, Space: p.Search.Space, Sampler: p.Search.Sampler, Current: p.Search.Current, FixedArgs: p.File.Server.Args,
		Presets: p.File.Sampler.Learns() && p.File.Sampler.Presets, Confirm: p.File.Budget.Confirm, MaxRounds: capacity.MaxRounds,
		Budget:      tuner.Budget{Trials: p.File.Budget.Trials, GPUTime: p.File.Budget.GPUTime, MinGain: p.File.Budget.MinGain},
		AcceptDrift: o.acceptDrift, Finish: o.finish, Observe: observe, Predict: predict,
	}, nil
}

// predictor returns the function that predicts the plan's points with the simulator; nil if nothing is predicted.
func predictor(p *plan.Plan) (func(context.Context, studies.Study) ([]studies.Trial, string, error), error) {
	f, err := forecast.New(p)
	if f == nil || err != nil {
		return nil, err
	}
	return f.Priors, nil
}
