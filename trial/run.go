package trial

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// ErrInterrupted is returned when a Task's Finish was closed. The recorded probes are kept; the rest of the trial is
// still to be done.
var ErrInterrupted = errors.New("interrupted between two probes")

// Lengths says how long a probe is.
type Lengths struct {
	LeadIn      time.Duration // uncounted load before the window
	Window      time.Duration // the window is at least this long
	MinRequests int           // the window counts at least this many requests
}

// A Runner measures points, one after the other, all in the same way.
// Use one Runner for all trials of a study: it keeps the LongRun, which is expensive to build.
type Runner struct {
	Start     Start
	Source    workload.Source
	SLO       slo.SLO
	Lengths   Lengths
	Confirm   Lengths // used instead of Lengths if the Task has Confirm: the probes are longer, and so are their lead-ins
	Cache     Protocol
	PrimeRate float64         // requests per second while the prefix cache is primed; 0 means as many as the server takes
	Search    capacity.Search // its Hint is the first rate of the first trial; 0 means a guess from the size of the KV cache
	Seed      uint64          // seed of requests and arrivals, the same in every trial
	Arrivals  workload.Arrivals
	Natural   bool     // whether the model decides where an answer ends; then no answer has a wrong length
	Marks     []string // notes that every result gets
	Simulated bool     // whether the server is simulated; a server that fails to start cannot report this itself

	// A trial ends early if its server accepts less than the fraction MinAcceptance (0 to 1) of the tokens that it
	// drafts. This is judged once, after MinDrafted drafted tokens. A MinAcceptance of 0 means no minimum.
	MinAcceptance float64
	MinDrafted    int

	// KnownCache says that the state of the server's prefix cache is known, as in a simulator. Then it is not verified,
	// which takes a third of the time of a simulated probe.
	KnownCache bool

	WorstCase bool // whether a measured server must also survive the largest load that it admits

	LongRun *LongRun // long run of Source, Seed and Arrivals, built when first needed. Runners of the same workload may share it.
}

// A Task is one trial to run.
type Task struct {
	Number   int
	Args     []string          // all args of the server after the model's name
	Env      map[string]string // environment variables of the point
	Hint     func() float64    // returns the first rate of the search, called after Accept; nil or 0 means the Runner's Hint
	MaxFails int               // probes that may fail before the first passes; 0 means no limit
	// Best is called after Accept, and returns the server that the point must beat. The search is then a race. If there
	// is no Best, or if that server has no capacity, the search finds the point's own capacity.
	Best    func() Rival
	Budget  time.Duration // GPU time of the trial; no probe except the first begins if it would exceed this; 0 means no limit
	Confirm bool          // asks for longer probes, in small steps from the Hint
	Draw    int           // number of the first probe's draw (one set of random requests); an independent measurement needs draws that no other trial uses
	Done    []Probe       // probes from before an interruption; they are not repeated
	// Attempt is the number of the server that is started for this trial, from 0. A later attempt repeats the probes
	// that a late load generator decided in earlier attempts.
	Attempt int
	Record  func(Probe) error // stores a probe

	Accept   func(serverctl.Facts) error // called when the server is ready; an error ends the trial; nil accepts any server
	Progress func(step string)           // called with the name of each step as it begins; nil means silent
	Booked   func(Spent)                 // called with what was spent since the last call, before each Record and at the end; may be nil
	Finish   <-chan struct{}             // when it is closed, Run finishes the current probe, if there is one, and returns ErrInterrupted
}

// A Rival is a measured server of the same study.
type Rival struct {
	Capacity capacity.Capacity
	Probes   []Probe // none if the point's server cannot be compared with the Rival probe by probe
	Unit     string  // see capacity.Race
}

// Run measures one point. If the server fails, that is a result and no error. An error means that ctx has ended, or
// that any other point would fail in the same way. The server is gone when Run returns.
func (r *Runner) Run(ctx context.Context, task Task) (Result, error) {
	return r.onServer(ctx, task, func(ctx context.Context, s *session) (capacity.Capacity, error) {
		return newSearchRun(s).run(ctx)
	})
}

// onServer starts the task's server, measures with it, and stops it.
func (r *Runner) onServer(ctx context.Context, task Task, measure func(context.Context, *session) (capacity.Capacity, error)) (Result, error) {
	task.progress("starting the server")
	began, books := time.Now(), NewBooks(r.Simulated)
	server, load, err := r.startServer(ctx, task)
	if err != nil {
		failed := Result{Notes: slices.Clone(r.Marks), Facts: serverctl.Facts{Simulated: r.Simulated}, GPUTime: time.Since(began)}
		failed, err = failure(failed, ctx, err)
		books.Add(Starting, failed.GPUTime)
		spent := books.Settle(Starting)
		task.booked(spent)
		failed.GPUTime, failed.Spent = failed.GPUTime+GPUTimeOf(task.Done), spent.Plus(SpentOn(task.Done))
		return failed, err
	}
	s := newSession(r, task, server, load, books)
	var found capacity.Capacity
	if task.Accept != nil {
		err = task.Accept(server.Facts())
	}
	if err == nil {
		found, err = s.whileServerLives(ctx, measure)
	}
	if stopErr := s.stop(ctx); stopErr != nil { // this ends the study, because the remains of this server would disturb the next one
		return s.result, errors.Join(err, fmt.Errorf("stop the server of trial %d: %w", task.Number, stopErr))
	}
	if err != nil {
		return failure(s.result, ctx, err)
	}
	s.result.Outcome, s.result.Capacity = Measured, found
	switch {
	case found.Limited != "":
		s.result.Class, s.result.Evidence = serverctl.ClientLimited, found.Why
	case task.Best != nil && !found.Met() && task.Best().Capacity.Carried() > 0:
		s.result.Outcome, s.result.Class, s.result.Evidence = Dropped, serverctl.DroppedByRace, found.Why
	}
	return s.result, nil
}

func (r *Runner) startServer(ctx context.Context, task Task) (server Server, load Load, err error) {
	err = task.unlessFinished(ctx, func(ctx context.Context) (err error) {
		launch := Launch{Number: task.Number, Args: task.Args, Env: task.Env, Progress: func(step string) { task.progress("%s", step) }}
		server, load, err = r.Start(ctx, launch)
		return err
	})
	return server, load, err
}

// failure turns a server's failure into a result, and leaves other errors as they are.
func failure(result Result, ctx context.Context, err error) (Result, error) {
	if errors.Is(err, capacity.ErrLimited) { // this machine is at fault, not the point
		result.Outcome, result.Class, result.Evidence = Unknown, serverctl.ClientLimited, err.Error()
		return result, nil
	}
	if rejected, ok := errors.AsType[rejectedDrafts](err); ok && ctx.Err() == nil {
		result.Outcome, result.Class, result.Evidence = Dropped, serverctl.AcceptanceNearZero, rejected.Error()
		return result, nil
	}
	exit, ok := errors.AsType[*serverctl.ExitError](err)
	if !ok || ctx.Err() != nil {
		return result, err
	}
	if exit.Fatal() {
		return result, WithRemedy(fmt.Errorf("no choice of flags would cure this: %w", err), exit.Class, exit.Cause)
	}
	result.Outcome, result.Class, result.Cause, result.Evidence, result.Tail = Unknown, exit.Class, exit.Cause, exit.Evidence, exit.Tail
	result.Argparse, result.KVGiB = exit.Argparse, exit.KVGiB
	result.GPUTime = max(result.GPUTime, exit.Took)
	if exit.Class.PointsFault() {
		result.Outcome = Infeasible
	}
	return result, nil
}

func (t Task) booked(s Spent) {
	if t.Booked != nil {
		t.Booked(s)
	}
}

func (t Task) progress(format string, args ...any) {
	if t.Progress != nil {
		t.Progress(fmt.Sprintf(format, args...))
	}
}

// finished returns ErrInterrupted once Finish is closed.
func (t Task) finished() error {
	select {
	case <-t.Finish:
		return ErrInterrupted
	default:
		return nil
	}
}

func (t Task) unlessFinished(ctx context.Context, do func(context.Context) error) error {
	return UnlessFinished(ctx, t.Finish, do)
}

// UnlessFinished runs a step of the trial, and cancels the step when finish is closed. It is for steps that leave no
// result when they end early. If the step ended because finish was closed, the error is ErrInterrupted.
func UnlessFinished(ctx context.Context, finish <-chan struct{}, step func(context.Context) error) error {
	ctx, stop := contextUntil(ctx, finish, func() error { return ErrInterrupted })
	defer stop()
	err := step(ctx)
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) {
		return ErrInterrupted
	}
	return err
}

// contextUntil returns a context that also ends when done is closed. The cause of the context is then the result of
// cause(). The returned function releases the context.
func contextUntil(ctx context.Context, done <-chan struct{}, cause func() error) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case <-done:
			cancel(cause())
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-watched
	}
}

// SearchLeadIn returns the default lead-in of a search's probes: the time of load before requests are counted. It is
// twice as long as a request may take, so that as many requests are in flight as in the long run. The limits and the
// mean length of an answer say how long a request may take.
func SearchLeadIn(s slo.SLO, source workload.Source) time.Duration {
	const minLeadIn, maxLeadIn, lifetimes = 30 * time.Second, 150 * time.Second, 2
	return min(max(minLeadIn, lifetimes*s.MayTake(meanAnswer(source))), maxLeadIn).Round(time.Second)
}

// DefaultLeadIn is the lead-in of a measurement that needs the capacity itself, not only a comparison of capacities.
//
// A cache that is carried from probe to probe needs twice as long as SearchLeadIn until its contents are as in the long
// run. This was measured on a simulated H200, with answers of 500 tokens at 60 ms and windows of two minutes.
// Capacities were 7 % too high with a lead-in of 60 s, 4 % with 120 s, and no better with 180 s. A search uses the
// shorter lead-in, because this error is the same for all capacities that it compares.
func DefaultLeadIn(s slo.SLO, source workload.Source, cache Protocol) time.Duration {
	leadIn := SearchLeadIn(s, source)
	if cache != Reset {
		leadIn *= 2
	}
	return leadIn
}

// meanAnswer is the mean length of the workload's answers in tokens.
func meanAnswer(source workload.Source) float64 {
	return meanOf(source, func(q *workload.Request) int { return q.OutputTokens })
}

// meanOf is the mean of a size over some requests of the workload.
func meanOf(source workload.Source, size func(*workload.Request) int) float64 {
	n := 512
	if source.Len() > 0 {
		n = min(n, source.Len())
	}
	sum := 0
	for i := range n {
		sum += size(source.Request(workload.PopulationStream, i))
	}
	return float64(sum) / float64(n)
}
