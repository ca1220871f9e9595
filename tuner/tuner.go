// Package tuner is the study loop: ask for a point, begin a trial, run it, finish it. It never talks to a server or a
// disk itself.
package tuner

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// A Store keeps the study. What it has acknowledged survives a kill.
type Store interface {
	History() (studies.Study, error) // see studies.Store
	Begin(studies.Trial) error
	Record(number int, p trial.Probe) error
	Finish(number int, r trial.Result) error
	Served(number int, version, changed string) error
	SetState(state studies.State, note string) error
}

// A Budget is what a study may spend.
type Budget struct {
	Trials  int           // in all, the default and the current args among them
	GPUTime time.Duration // starts, lead-ins, windows, run-outs and stops, all of it; 0 means no limit. No trial begins after it.
}

// A Study is one study to run, or to go on with.
type Study struct {
	Store       Store
	Runner      *trial.Runner
	Space       *space.Space
	Sampler     sampler.Sampler
	Current     space.Point // what the user runs today: trial 1; nil when unknown
	FixedArgs   []string    // given to every trial, before those of its point
	Budget      Budget
	AcceptDrift bool            // go on although the server is another than in earlier trials
	Finish      <-chan struct{} // closed: finish the probe at hand and stop
	Observe     func(Event)     // told what happens, one call at a time; nil means nobody listens

	ended   int // trials, of this Run
	unknown int // of them in a row that failed by nobody's fault
	client  lateness
}

// An Event is something that a watcher of a study wants to know.
type Event struct {
	Kind  EventKind
	Trial studies.Trial // as far as it is known
	Probe *trial.Probe  // for Probed
	Step  string        // for Step: what begins now
}

// An EventKind says what happened.
type EventKind int

// The kinds of event, in the order in which a trial has them.
const (
	Began EventKind = iota
	Step
	Probed
	Ended
)

// ErrNothingStarts is returned when the servers of several trials in a row failed for reasons that no point is to blame for.
var ErrNothingStarts = errors.New("the server fails whatever the flags are")

const (
	// mostUnknown is how many trials in a row may fail by nobody's fault before the study gives up.
	mostUnknown = 3
	// mostInfeasible is how many of a study's first trials may be infeasible, the default and the current args among them, before
	// it gives up: a search with nothing that starts has nothing to learn from.
	mostInfeasible = 10
)

// An End says why a study is over. The zero End is none.
type End struct {
	Why   string // one line for a human
	Spent bool   // the GPU time ended before the trials did
}

// Run asks, begins, runs and finishes trials until the study is over. What a killed run left half done is finished first,
// with the probes it had. On an error, trial.ErrInterrupted among them, everything acknowledged is stored.
func (s *Study) Run(ctx context.Context) (End, error) {
	for {
		study, err := s.Store.History()
		if err != nil {
			return End{}, err
		}
		first := len(study.Trials) - s.ended // of this Run
		study.Trials = append(studies.Forgiven(study.Trials[:first]), study.Trials[first:]...)
		if end, err := s.over(ctx, study); end != (End{}) || err != nil {
			return end, err
		}
		next, err := s.ask(study)
		if errors.Is(err, sampler.ErrExhausted) {
			return End{Why: err.Error()}, nil
		}
		if err != nil {
			return End{}, fmt.Errorf("choose the point of trial %d: %w", len(study.Trials), err)
		}
		if err := s.Store.Begin(next); err != nil {
			return End{}, fmt.Errorf("begin trial %d: %w", next.Number, err)
		}
		s.observe(Event{Kind: Began, Trial: next})
		if next.Result, err = s.run(ctx, &next, study); err != nil {
			return End{}, fmt.Errorf("trial %d: %w", next.Number, err)
		}
		if err := s.Store.Finish(next.Number, next.Result); err != nil {
			return End{}, fmt.Errorf("finish trial %d: %w", next.Number, err)
		}
		next.State = studies.Done
		s.ended++
		s.observe(Event{Kind: Ended, Trial: next})
	}
}

// over says why no further trial is to begin, or nothing.
func (s *Study) over(ctx context.Context, study studies.Study) (End, error) {
	select {
	case <-s.Finish:
		return End{}, trial.ErrInterrupted
	case <-ctx.Done():
		return End{}, context.Cause(ctx)
	default:
	}
	if err := s.client.tooMuch(); err != nil {
		return End{}, err
	}
	var spent time.Duration
	finished, infeasible := 0, 0
	for _, t := range study.Trials {
		if t.State != studies.Done {
			return End{}, nil // half done: it is finished whatever the budget says
		}
		if !t.Counts() {
			continue
		}
		finished++
		spent += t.Result.GPUTime
		if t.Result.Outcome == trial.Infeasible {
			infeasible++
		}
	}
	n := len(study.Trials)
	switch {
	case s.ended >= studies.SameWords && !study.Trials[n-1].Counts(): // a Run tries so many again: they may have been the points, after all
		return End{}, diedAlike(study)
	case s.unknown >= mostUnknown:
		return End{}, nothingStarts(study, "the last %d trials failed by nobody's fault", s.unknown)
	case finished >= mostInfeasible && infeasible == finished && finished < s.Budget.Trials:
		return End{}, nothingStarts(study, "none of the first %d points is feasible", finished)
	case finished >= s.Budget.Trials && studies.AllDiedAlike(study.Trials): // so few that the budget ended before SameWords
		return End{}, diedAlike(study)
	case finished >= s.Budget.Trials && finished > 0 && len(study.Present().Trials) == 0:
		return End{Why: "budget.trials was used up before the world changed: raise it to measure in the present one", Spent: true}, nil
	case finished >= s.Budget.Trials:
		return End{Why: "budget.trials is used up"}, nil
	case s.Budget.GPUTime > 0 && spent >= s.Budget.GPUTime:
		return End{Why: fmt.Sprintf("the GPU time of %s is spent after %s", render.Span(s.Budget.GPUTime), render.Count(finished, "trial")), Spent: true}, nil
	}
	return End{}, nil
}

func nothingStarts(study studies.Study, format string, args ...any) error {
	last := study.Trials[len(study.Trials)-1].Result
	return withRemedy(last, fmt.Errorf("%w: %s; the last: %s: %s", ErrNothingStarts, fmt.Sprintf(format, args...), last.Class, last.Evidence))
}

// diedAlike says that no server came up and that the flags made no difference.
func diedAlike(study studies.Study) error {
	n := len(study.Trials)
	study.Trials[n-1].Result.Cause = serverctl.SameWords
	if n == 1 {
		return nothingStarts(study, "the only server died in its start")
	}
	return nothingStarts(study, "each of the first %d servers died with the same words", n)
}

// withRemedy adds what the user can do about a failure, where that is known.
func withRemedy(r trial.Result, err error) error {
	if remedy := serverctl.Remedy(r.Class, r.Cause); remedy != "" {
		return fmt.Errorf("%w; %s", err, remedy)
	}
	return err
}

// ask returns the trial to run: a half-done one, the server's default, the user's current args, the best of what was measured elsewhere,
// or the sampler's choice. A reference that failed by nobody's fault is asked for again, and so is one that was measured before the world changed.
func (s *Study) ask(study studies.Study) (studies.Trial, error) {
	n := len(study.Trials)
	now := tried(study.Present(), n-s.ended)
	prior := s.untriedPrior(now)
	next := studies.Trial{Number: n, State: studies.Running, Began: time.Now()}
	switch {
	case n > 0 && study.Trials[n-1].State == studies.Running:
		next = study.Trials[n-1]
	case !known(now, studies.Default):
		next.Origin, next.Point = studies.Default, space.Point{}
	case len(s.Current) > 0 && !known(now, studies.Current):
		next.Origin, next.Point = studies.Current, s.Current
	case prior != nil:
		next.Origin, next.Point = studies.Prior, prior
	default:
		point, err := s.Sampler.Next(n, history(now))
		if err != nil {
			return next, err
		}
		next.Origin, next.Point = studies.Sampled, point
	}
	next.Args = append(append([]string{}, s.FixedArgs...), s.Space.Args(next.Point)...)
	return next, nil
}

// tried returns the study in which the points of this Run, which began with the trial of that number, are tried even where they do not
// count: else a broken machine would be told by the default alone, which may be what is broken.
func tried(study studies.Study, first int) studies.Study {
	study.Trials = slices.Clone(study.Trials)
	for i := range study.Trials {
		if t := &study.Trials[i]; t.Number >= first && !t.Counts() {
			t.Result.Outcome, t.Result.Cause = trial.Infeasible, ""
		}
	}
	return study
}

// known reports whether a trial of that origin told something. One that the load generator decided is asked for again, for no gain can
// be stated over it; but not for ever.
func known(study studies.Study, origin studies.Origin) bool {
	limited := 0
	for _, t := range study.Trials {
		switch {
		case t.Origin != origin || t.Result.Outcome == trial.Unknown && t.Result.Class != serverctl.ClientLimited:
		case t.Result.Class != serverctl.ClientLimited:
			return true
		default:
			limited++
		}
	}
	return limited >= mostLimited
}

// run measures one trial; each probe is stored before it counts. A failure that a fresh server may not have gets a second
// chance before it is held against the point, or counted.
func (s *Study) run(ctx context.Context, t *studies.Trial, study studies.Study) (trial.Result, error) {
	result, err := s.runOnce(ctx, t, study, attempts(t.Probes))
	if changed, ok := errors.AsType[*changedError](err); ok {
		return trial.Result{Outcome: trial.Unknown, Class: serverctl.Aborted, Evidence: changed.Error(), GPUTime: measured(t.Probes)}, nil
	}
	if err == nil && result.Class.Retryable() {
		s.observe(Event{Kind: Step, Trial: *t, Step: fmt.Sprintf("once more, for it ended with %s", result.Class)})
		first, recorded := result, measured(t.Probes)
		result, err = s.runOnce(ctx, t, study, attempts(t.Probes)+1)
		result.GPUTime += first.GPUTime - recorded // both runs count the first's probes
		result.Notes = append(result.Notes, fmt.Sprintf("a first server ended with %s: %s", first.Class, first.Evidence))
	}
	if err == nil {
		err = s.blame(t, &result)
	}
	s.unknown++
	if err != nil || result.Outcome != trial.Unknown || result.Class == serverctl.ClientLimited { // the server did not fail
		s.unknown = 0
	}
	return result, err
}

// attempts is the number of the newest attempt among probes.
func attempts(probes []trial.Probe) (newest int) {
	for _, p := range probes {
		newest = max(newest, p.Attempt)
	}
	return newest
}

// blame says whose fault a failure is where the class and cause alone do not tell. Its error ends the study, and the trial is taken up
// again when the machine is mended.
func (s *Study) blame(t *studies.Trial, r *trial.Result) error {
	switch {
	case r.Cause.Machine():
	case r.Class == serverctl.FlagsRejected && serverctl.IsArgparse(r.Evidence) && len(t.Point) == 0: // every trial has these args
	case r.Cause == serverctl.HostOOM && slices.ContainsFunc(slices.Collect(maps.Keys(t.Point)), serverctl.AsksHostMemory):
		r.Outcome = trial.Infeasible // a second server with the same flags found no memory either
		return nil
	default:
		return nil
	}
	return withRemedy(*r, fmt.Errorf("%w: %s: %s", ErrNothingStarts, serverctl.Words(r.Class, r.Cause), r.Evidence))
}

// measured is the GPU time of probes.
func measured(probes []trial.Probe) (sum time.Duration) {
	for _, p := range probes {
		sum += p.GPUTime
	}
	return sum
}

func (s *Study) runOnce(ctx context.Context, t *studies.Trial, study studies.Study, attempt int) (trial.Result, error) {
	return s.Runner.Run(ctx, trial.Task{
		Number: t.Number, Args: t.Args, Attempt: attempt, Hint: func() float64 { return hint(study.Present(), t.Version) }, Done: t.Probes,
		Record: func(p trial.Probe) error {
			if err := s.Store.Record(t.Number, p); err != nil {
				return err
			}
			t.Probes = append(t.Probes, p)
			s.client.count(p)
			s.observe(Event{Kind: Probed, Trial: *t, Probe: &p})
			return nil
		},
		Accept:   func(facts serverctl.Facts) error { return s.served(study, t, facts.Version) },
		Progress: func(step string) { s.observe(Event{Kind: Step, Trial: *t, Step: step}) },
		Finish:   s.Finish,
	})
}

// served stores of which version a trial's server is. Another one than that of earlier trials, or of the trial's own first probes, is refused unless the
// user accepts it: what was measured on the two cannot be compared. Where a server does not say its version nothing is known to have changed.
func (s *Study) served(study studies.Study, t *studies.Trial, version string) error {
	if version == "" || t.Version == version { // of a half-done trial; that the user accepted it, if he had to, is stored
		return nil
	}
	before := *t
	if len(t.Probes) == 0 || t.Version == "" {
		i := lastIndex(study.Trials[:t.Number], func(t studies.Trial) bool { return t.Version != "" })
		switch {
		case i < 0 || study.Trials[i].Version == version && t.Version == "":
			return s.serve(t, version, "")
		case study.Trials[i].Version == version: // another was accepted, and is taken back before anything was measured on it
			return s.serve(t, version, versionChange(*t, version))
		}
		before = study.Trials[i]
	}
	change := versionChange(before, version)
	switch {
	case !s.AcceptDrift:
		return fmt.Errorf("%w: %s; start the old version, begin a study under another name, or go on with --accept-drift", studies.ErrWorldChanged, change)
	case len(t.Probes) > 0:
		return &changedError{change}
	}
	return s.serve(t, version, change)
}

func versionChange(before studies.Trial, version string) string {
	return fmt.Sprintf("server version: %s in trial %d → %s", before.Version, before.Number, version)
}

func (s *Study) serve(t *studies.Trial, version, changed string) error {
	if err := s.Store.Served(t.Number, version, changed); err != nil {
		return err
	}
	t.Version = version
	return nil
}

// A changedError says that the server is another one than that on which a trial's first probes were measured.
type changedError struct{ change string }

func (e *changedError) Error() string {
	return "the world changed before the trial was finished: " + e.change
}

func lastIndex(trials []studies.Trial, is func(studies.Trial) bool) int {
	for i, t := range slices.Backward(trials) {
		if is(t) {
			return i
		}
	}
	return -1
}

func (s *Study) observe(e Event) {
	if s.Observe != nil {
		s.Observe(e)
	}
}
