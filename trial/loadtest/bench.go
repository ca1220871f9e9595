// Package loadtest measures a running server that somebody else started: runs at given loads, or a search for the highest
// rate that keeps the SLO. It writes the results as text, CSV, JSON and YAML. It never reads flags.
package loadtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// A Bench measures one server.
type Bench struct {
	Client *bench.Client
	Sender trial.ClosedLoad // sends the requests; nil means that the field Client sends them
	Load   Load
	Runs   []Run         // planned runs in order; a search has a single run here, which serves only to check the lengths of its requests
	SLO    *slo.SLO      // may be nil
	Limits []bench.Limit // limits that a request must keep to count for goodput
	Search *Search       // nil if no capacity is searched

	ResetCache bool      // whether to empty the prefix cache before each run
	Notes      io.Writer // gets notes and progress for people
}

// An InputError says that the user asked for a run that is impossible.
type InputError struct{ error }

// Unwrap returns the wrapped error.
func (e InputError) Unwrap() error { return e.error }

// interruptedError says which run the user ended.
type interruptedError string

func (e interruptedError) Error() string { return string(e) }

// Is makes the error match context.Canceled, because the user ended the run.
func (interruptedError) Is(target error) bool { return target == context.Canceled }

// Preflight checks that the server can answer the runs. It sets the client's model to the first model that the server
// lists.
func (b *Bench) Preflight(ctx context.Context) error {
	info, err := b.Client.Preflight(ctx)
	if err != nil {
		return err
	}
	b.Client.Model = info.Model
	if info.MaxModelLen == 0 {
		return nil
	}
	uncounted, err := b.Client.CheckLengths(ctx, b.requests(), info.MaxModelLen)
	if err == nil && uncounted > 0 {
		fmt.Fprintf(b.Notes, "%s may be longer than max-model-len %d; their tokens were not counted, because the server has no /tokenize or the texts are too many\n", render.Count(uncounted, "text"), info.MaxModelLen)
	}
	return err
}

// maxChecked is how many requests of each run Preflight checks. The check generates each prompt a second time, which
// would take minutes for millions of prompts.
const maxChecked = 20_000

// requests returns the requests of the runs, without their run-outs, so that Preflight can check their lengths.
func (b *Bench) requests() iter.Seq[*workload.Request] {
	return func(yield func(*workload.Request) bool) {
		for _, r := range b.Runs {
			n := 0
			for a := range r.schedule {
				if n++; a.Phase == workload.RunOut || n > maxChecked {
					break
				}
				if !yield(a.Request) {
					return
				}
			}
			if b.Load.Source != nil && b.Load.Source.Len() == 0 {
				return // the lengths in the other runs come from the same distribution
			}
		}
	}
}

// Sweep makes all runs, one after the other. It goes on after a run that breaks the SLO.
func (b *Bench) Sweep(ctx context.Context, report *Report) error {
	var steps []capacity.Step
	for _, planned := range b.Runs {
		r, err := b.measure(ctx, planned, nil)
		if err != nil {
			return err
		}
		if err := report.add(r); err != nil {
			return err
		}
		steps = append(steps, capacity.Step{Rate: r.Load(), Outcome: r.outcome()})
	}
	return report.Finish(steps)
}

// measure makes one run. The parameter stop may end the run early; if stop is nil, the run does not end early.
func (b *Bench) measure(ctx context.Context, planned Run, stop bench.Stop) (Result, error) {
	if b.ResetCache {
		if err := b.Client.ResetCache(ctx); err != nil {
			return Result{}, fmt.Errorf("%s: %w", planned, err)
		}
	}
	client := *b.Client
	shown := render.NewProgress(b.Notes).Quietly()
	client.Progress = func(at bench.Progress) { shown.Show(planned.stage(at)) } // called once a second
	sender := cmp.Or[trial.ClosedLoad](b.Sender, &client)
	run, err := sender.RunClosed(ctx, planned.schedule, cmp.Or(planned.Streams, client.MaxInFlight), b.byRules(stop))
	shown.End()
	switch {
	case errors.Is(err, context.Canceled):
		return Result{}, interruptedError(fmt.Sprintf("%s was interrupted and has no result; runs before it are complete", planned))
	case err != nil:
		return Result{}, fmt.Errorf("%s: %w", planned, err)
	}
	if err := b.checkAlive(ctx, planned, run); err != nil {
		return Result{}, err
	}
	scope := b.scope(planned, run)
	r := Result{
		Run: planned, Measurement: bench.Measure(run, scope), scope: scope, samples: run.Samples,
		took: run.Elapsed, stopped: run.Stopped,
	}
	if b.SLO != nil && run.Tally == nil {
		n := planned.planned
		if b.Load.Live { // planned counts conversations, but every turn is judged
			n = len(run.Samples)
		}
		v := b.SLO.Judge(b.rules().Apply(run.Samples), n, run.Elapsed)
		r.Verdict, r.Limited = &v, v.ClientLimited
	} else {
		r.Limited = clientLimited(r.Measurement)
	}
	if r.Measurement.Void != "" { // a void measurement says nothing about a limit
		r.Verdict = nil
	}
	r.notes = b.notes(r, run)
	return r, nil
}

// checkAlive asks the server for two tokens if a search ended a run early and no request was completed. This
// distinguishes a dead server from a slow one. Other runs wait until their requests have failed, so they need no check.
func (b *Bench) checkAlive(ctx context.Context, planned Run, run bench.Run) error {
	if !run.Silent() || b.Search == nil || b.Sender != nil {
		return nil
	}
	fmt.Fprintf(b.Notes, "%s: no request was completed; asking the server for two tokens\n", planned)
	if _, err := b.Client.Preflight(ctx); err != nil {
		return fmt.Errorf("%s: no request was completed, and then a single request failed too: %v; see the server's log", planned, err)
	}
	return nil
}

// workload returns the name of the workload or of the trace.
func (b *Bench) workload() string {
	if b.Load.Source == nil {
		return b.Load.Arrivals.Trace.Name()
	}
	return b.Load.Source.Name()
}

func (b *Bench) rules() bench.Rules { return b.Client.Rules.For(b.Client.Endpoint) }

// byRules returns a Stop that applies the client's rules to the samples, and then passes the samples to the given Stop.
func (b *Bench) byRules(stop bench.Stop) bench.Stop {
	if stop == nil {
		return nil
	}
	return func(now time.Duration, counted []bench.Sample) bool { return stop(now, b.rules().Apply(counted)) }
}

// scope says which part of a run is measured.
func (b *Bench) scope(planned Run, run bench.Run) bench.Scope {
	scope := bench.Scope{
		Rate: planned.Rate, Start: planned.leadIn, Length: planned.window,
		Natural: b.Client.Natural, Rules: b.rules(), Limits: b.Limits,
	}
	if planned.window > 0 {
		return scope
	}
	return scope.ByCount(run)
}
