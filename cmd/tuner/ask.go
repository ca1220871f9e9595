package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"vllmtuner/trial"
	"vllmtuner/tuner/asktell"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

// startOptimiser starts the program that chooses the plan's points, and waits until it is ready. It returns nil if the
// study has a sampler of its own.
func startOptimiser(ctx context.Context, p *plan.Plan, stderr io.Writer) (*asktell.Program, error) {
	file := p.File
	if file.Sampler.Name != studyfile.Ask {
		return nil, nil
	}
	program, err := asktell.Start(ctx, asktell.Config{
		Command: file.Sampler.Command, Dir: filepath.Dir(file.Path), Timeout: file.Sampler.Timeout,
		Say:   func(line string) { fmt.Fprintln(stderr, optimiserLine(line)) },
		Study: file.Name, Space: p.Search.Space, Constraints: file.Constraints, Seed: file.Sampler.Seed, Trials: file.Budget.Trials,
		Objective: file.Objective,
	})
	switch {
	case errors.Is(err, asktell.ErrInterrupted):
		return nil, trial.ErrInterrupted
	case err != nil: // the program is the user's, and nothing is stored yet
		return nil, usage("%s: sampler.command: %w", file.Path, err)
	}
	p.Search.Sampler = program
	return program, nil
}

// optimiserLine marks a line that the optimiser wrote to its standard error.
func optimiserLine(line string) string { return "optimiser: " + line }

// startOptimiser starts the program that chooses the plan's points, if there is one. The returned function stops the
// program. If the user asks for an end, the program is interrupted.
func (o runOptions) startOptimiser(ctx context.Context, p *plan.Plan) (end func() error, err error) {
	ctx, cancel := orderly(ctx, o.finish)
	program, err := startOptimiser(ctx, p, o.stderr)
	if program == nil {
		cancel()
		return func() error { return nil }, err
	}
	release := context.AfterFunc(ctx, program.Interrupt)
	return func() error {
		release()
		cancel()
		return program.Stop()
	}, nil
}

// If a program chooses the plan's points, interruptOptimiser interrupts it when ctx ends.
func interruptOptimiser(ctx context.Context, p *plan.Plan) (release func() bool) {
	if program, ok := p.Search.Sampler.(*asktell.Program); ok {
		return context.AfterFunc(ctx, program.Interrupt)
	}
	return func() bool { return false }
}

// If a program chooses the plan's points, showOptimiser shows what it writes to its standard error.
func (p *progress) showOptimiser(of *plan.Plan) {
	if program, ok := of.Search.Sampler.(*asktell.Program); ok {
		program.Say(func(line string) { p.shown.Line(0, "%s", optimiserLine(line)) })
	}
}

// checkOptimiser starts the program that chooses the plan's points, and ends it once it is ready.
func checkOptimiser(ctx context.Context, p *plan.Plan, stderr io.Writer, say plan.Say) error {
	program, err := startOptimiser(ctx, p, stderr)
	if program == nil || err != nil {
		return err
	}
	say("sampler", "%s is ready to choose points", strings.Join(p.File.Sampler.Command, " "))
	return program.Stop()
}
