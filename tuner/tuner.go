// Package tuner has the loop of a study: choose a point, begin a trial, run it, finish it. It never talks to a server
// or a disk itself.
package tuner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// A Store keeps the study. If a call returns no error, its data are kept even if the process is killed.
type Store interface {
	// History returns the study. A finished trial has its probes only if the function whole returns its number; see
	// studies.Store.
	History(whole func(studies.Study) []int) (studies.Study, error)
	Begin(studies.Trial) error
	Record(number int, p trial.Probe) error
	Finish(number int, r trial.Result) error
	Served(number int, version string, change studies.Change) error
	AddPriors([]studies.Source) error
	// Spend adds time to what the study has spent. The next of the other calls stores it.
	Spend(trial.Spent)
	// Killed returns how long the last run went on after its last write, if it was killed.
	Killed() time.Duration
}

// A Budget limits what a study may spend.
type Budget struct {
	Trials  int           // number of trials, including the default and the current args
	MinGain float64       // smallest gain that is worth more GPU time, in ln(capacity); 0 measures every point in full
	GPUTime time.Duration // limit for starts, probes and stops; once it is spent, no trial begins; 0 means no limit
}

// A Study is one study to run. If it was interrupted, it continues where it ended.
type Study struct {
	Store       Store
	Runner      *trial.Runner
	Space       *space.Space
	Sampler     sampler.Sampler
	Current     space.Point // the user's current args, measured by trial 1; nil if unknown
	Confirm     int         // number of best points that are measured once more at the end, with fresh requests
	MaxRounds   int         // largest number of confirmations of one point
	Presets     bool        // whether the presets are measured before the sampler chooses
	FixedArgs   []string    // args of every trial; the args of the point come after them
	Budget      Budget
	AcceptDrift bool            // continue if the server has another version than in earlier trials
	Finish      <-chan struct{} // when it is closed, Run finishes the current probe and returns
	Observe     func(Event)     // called for each event, one call at a time; may be nil
	// Predict returns priors for the whole space from what the study has measured. Run calls it after the first measured
	// trial, and after the second and the third while it has no answer. Run stores the priors. nil means no predictions.
	// The note says how they were made.
	Predict func(ctx context.Context, study studies.Study) (trials []studies.Trial, note string, err error)

	oneRun
}

// oneRun is the state of one call of Run. Each call begins with a new one.
type oneRun struct {
	books         trial.Books
	ended         int      // number of trials that this call has finished
	unknownInRow  int      // number of latest trials in a row whose outcome is Unknown
	generator     lateness // how often the load generator was late
	unpredictable bool     // Predict took too long
}

// An Event tells the Observe function of a Study what has happened.
type Event struct {
	Kind  EventKind
	Trial studies.Trial // the trial, as far as it is known
	Probe *trial.Probe  // for Probed: the new probe
	Step  string        // for Step: name of the step that begins; for Remark: a line of text for the user
	Best  bool          // for Ended: the trial is now the Incumbent
}

// An EventKind is the kind of an Event.
type EventKind int

// The kinds of events, in their order within a trial.
const (
	Began EventKind = iota
	Step
	Probed
	Ended
	Remark // something that the user should see, between two trials
)

// ErrNothingStarts is returned if the servers fail for all points. This shows that the flags are not the reason.
var ErrNothingStarts = errors.New("the server fails whatever the flags are")

const (
	// maxUnknown is a limit: if maxUnknown trials in a row failed for a reason other than their points, the study gives
	// up.
	maxUnknown = 3
	// maxInfeasible is the limit of infeasible trials at the beginning of a study, including the default and the
	// current args. If none of them is feasible the study gives up, because a sampler learns nothing if all points
	// fail.
	maxInfeasible = 10
)

// An End says why a study is over. The zero End means that the study is not over.
type End struct {
	Why   string // one line of text for the user
	Spent bool   // the GPU time was used up before all trials were run
}

// State returns the final state and the note of a study. planned is the number of trials that its search may run. The
// state is Spent if the GPU time was used up before any trial of the present world met the SLO. A world is all that
// must not change while trials are compared.
func (e End) State(study studies.Study, planned int) (state studies.State, note string) {
	if e.Spent && !slices.ContainsFunc(study.Present().Trials, studies.Trial.Met) {
		return studies.Spent, e.Why
	}
	if len(searchTrials(study.Trials)) == planned && !e.Spent { // no note is needed: the number of trials shows that all were run
		return studies.Done, ""
	}
	return studies.Done, e.Why
}

// Run chooses, begins, runs and finishes trials until the study is over. If an earlier Run was killed during a trial,
// that trial is finished first and keeps its probes. If Run returns an error, such as trial.ErrInterrupted, the store
// keeps all probes and trials so far. If there is advice for the user, the error is a *trial.RemedyError.
func (s *Study) Run(ctx context.Context) (End, error) {
	s.oneRun = oneRun{}
	s.openBooks()
	defer s.settle()
	for {
		study, err := s.Store.History(s.needed)
		if err != nil {
			return End{}, err
		}
		study = s.withoutOldPredictions(study)
		first := len(study.Trials) - s.ended // index of the first trial that this Run began
		study.Trials = append(studies.Forgiven(study.Trials[:first]), study.Trials[first:]...)
		end, err := s.whyOver(ctx, study)
		if err != nil {
			return end, err
		}
		var next studies.Trial
		if end == (End{}) {
			if study, err = s.predicted(ctx, study); err != nil {
				return End{}, err
			}
			next, err = s.nextTrial(study)
		}
		if errors.Is(err, sampler.ErrExhausted) {
			end, err = End{Why: err.Error()}, nil
		}
		if err != nil {
			return End{}, cmp.Or(s.asked(ctx), trial.Prefixed(fmt.Sprintf("choose the point of trial %d", len(study.Trials)), err))
		}
		if end != (End{}) { // the search is over
			point, left := s.unconfirmed(study)
			if !left {
				return end, nil
			}
			next = s.trialOf(study, studies.Confirmed, point)
		}
		s.settle()
		if err := s.Store.Begin(next); err != nil {
			return End{}, fmt.Errorf("begin trial %d: %w", next.Number, err)
		}
		s.observe(Event{Kind: Began, Trial: next})
		if next.Result, err = s.runTrial(ctx, &next, study); err != nil {
			return End{}, ofTrial(next, err)
		}
		s.settle()
		if err := s.Store.Finish(next.Number, next.Result); err != nil {
			return End{}, fmt.Errorf("finish trial %d: %w", next.Number, err)
		}
		next.State = studies.Done
		s.ended++
		study.Trials = append(study.Trials[:next.Number:next.Number], next)
		best, found := Incumbent(study)
		s.observe(Event{Kind: Ended, Trial: next, Best: found && best.Number == next.Number})
	}
}

// Incumbent returns the best trial of the search so far, in the present world (since the last accepted change of the
// settings), by the study's objective. It ignores confirmations; see bestConfirmation for them. After a trial on
// another server version, earlier trials no longer count. If no trial has met the SLO yet, found is false.
func Incumbent(study studies.Study) (best studies.Trial, found bool) {
	version, o := "", study.Objective()
	for _, t := range searchTrials(study.Present().Trials) {
		if t.State != studies.Done {
			continue
		}
		if t.Version != "" && t.Version != version { // a trial whose server did not start has no version
			version, found = t.Version, false
		}
		if t.Met() && (!found || o.Of(t).Carried() > o.Of(best).Carried()) {
			best, found = t, true
		}
	}
	return best, found
}

// Compared returns the numbers of the finished trials that a study still needs in full. New points race against the
// Incumbent, finalists race against the best confirmation, and the rounds of confirmations compare all of these.
func Compared(study studies.Study) (numbers []int) {
	if best, found := Incumbent(study); found {
		numbers = append(numbers, best.Number)
	}
	for _, t := range study.Present().Trials {
		if t.Origin == studies.Confirmed && t.State == studies.Done {
			numbers = append(numbers, t.Number)
		}
	}
	return numbers
}

// toBeat returns the Incumbent as the rival of a trial. It returns the zero Rival if there is no Incumbent, or if the
// Incumbent's server had another version.
func toBeat(study studies.Study, t *studies.Trial) trial.Rival {
	best, found := Incumbent(study)
	if !found || best.Version != t.Version {
		return trial.Rival{}
	}
	return rivalFor(t, best, study.Objective())
}

// asked returns the reason if somebody has asked Run to end.
func (s *Study) asked(ctx context.Context) error {
	select {
	case <-s.Finish:
		return trial.ErrInterrupted
	case <-ctx.Done():
		return context.Cause(ctx)
	default:
		return nil
	}
}

// whyOver says why no further trial begins. It returns the zero End if the study continues.
func (s *Study) whyOver(ctx context.Context, study studies.Study) (End, error) {
	if err := s.asked(ctx); err != nil {
		return End{}, err
	}
	if err := s.generator.tooLate(); err != nil {
		return End{}, err
	}
	finished := lo.Filter(searchTrials(study.Trials), func(t studies.Trial, _ int) bool { return t.State == studies.Done && t.Counts() })
	infeasible := lo.CountBy(finished, func(t studies.Trial) bool { return t.Result.Outcome == trial.Infeasible })
	halfDone := slices.ContainsFunc(study.Trials, func(t studies.Trial) bool { return t.State != studies.Done })
	n, done := len(study.Trials), len(finished)
	switch {
	case halfDone: // this trial is finished even if the budget is spent
		return End{}, nil
	case s.ended >= studies.SameWords && !study.Trials[n-1].Counts(): // each Run first tries SameWords trials, because the points may have been the reason
		return End{}, diedAlike(study)
	case s.unknownInRow >= maxUnknown:
		return End{}, nothingStarts(study, "the last %d trials failed for other reasons than their flags", s.unknownInRow)
	case done >= maxInfeasible && infeasible == done && done < s.Budget.Trials:
		return End{}, nothingStarts(study, "none of the first %d points is feasible", done)
	case done >= s.Budget.Trials && studies.AllDiedAlike(study.Trials): // the budget has fewer trials than SameWords
		return End{}, diedAlike(study)
	case done >= s.Budget.Trials && done > 0 && len(study.Present().Trials) == 0:
		return End{Why: "budget.trials was used up before the world changed: raise it to measure in the new world", Spent: true}, nil
	case done >= s.Budget.Trials:
		return End{Why: "budget.trials is used up"}, nil
	case s.Budget.GPUTime > 0 && spent(study) >= s.Budget.GPUTime:
		why := fmt.Sprintf("the GPU time of %s is spent after %s", render.Span(s.Budget.GPUTime), render.Count(done, "trial"))
		return End{Why: why, Spent: true}, nil
	case s.Budget.MinGain > 0 && hopeless(finished):
		return End{Why: fmt.Sprintf("none of the first %d points keeps the SLO at any rate that was tried", done)}, nil
	case s.promisesLittle(study):
		return End{Why: fmt.Sprintf("no flags promise to gain %s (budget.min_gain)", render.Share(s.Budget.MinGain))}, nil
	}
	return End{}, nil
}

func nothingStarts(study studies.Study, format string, args ...any) error {
	last := study.Trials[len(study.Trials)-1].Result
	return withRemedy(last, fmt.Errorf("%w: %s; the last: %s: %s", ErrNothingStarts, fmt.Sprintf(format, args...), last.Class, last.Evidence))
}

// diedAlike returns the error for a study whose servers all died in their start with the same message. This shows that
// the flags are not the reason.
func diedAlike(study studies.Study) error {
	n := len(study.Trials)
	study.Trials[n-1].Result.Cause = serverctl.SameWords
	if n == 1 {
		return nothingStarts(study, "the only server died during its start")
	}
	return nothingStarts(study, "each of the first %d servers died with the same message", n)
}

// withRemedy adds advice for the user to err, if there is any advice.
func withRemedy(r trial.Result, err error) error {
	return trial.WithRemedy(err, r.Class, r.Cause)
}

// ofTrial says in the error which trial failed, and adds advice if no server starts.
func ofTrial(t studies.Trial, err error) error {
	err = trial.Prefixed(fmt.Sprintf("trial %d", t.Number), err)
	if _, advised := err.(*trial.RemedyError); !advised && errors.Is(err, ErrNothingStarts) {
		return withRemedy(t.Result, err)
	}
	return err
}

// nextTrial returns the trial to run. It takes the first of these that is left: a half-done trial, the server's
// default, the user's current args, the presets, the best priors, and then the sampler's choices. The default and the
// current args are measured again if their trials had no useful result, or if the world has changed since these trials.
func (s *Study) nextTrial(study studies.Study) (studies.Trial, error) {
	n := len(study.Trials)
	now := countAsTried(study.Present(), n-s.ended)
	now.Trials = searchTrials(now.Trials)
	prior, preset := s.untriedPrior(now), s.untriedPreset(now)
	switch {
	case n > 0 && study.Trials[n-1].State == studies.Running:
		return study.Trials[n-1], nil
	case !referenceKnown(now, studies.Default):
		return s.trialOf(study, studies.Default, space.Point{}), nil
	case len(s.Current) > 0 && !referenceKnown(now, studies.Current):
		return s.trialOf(study, studies.Current, s.Current), nil
	case preset != nil:
		return s.trialOf(study, studies.Preset, preset), nil
	case prior != nil:
		return s.trialOf(study, studies.Prior, prior), nil
	}
	point, err := s.Sampler.Next(n, history(now))
	return s.trialOf(study, studies.Sampled, point), err
}

// trialOf returns the study's next trial, with the given point. origin says how the point was chosen.
func (s *Study) trialOf(study studies.Study, origin studies.Origin, point space.Point) studies.Trial {
	return studies.Trial{
		Number: len(study.Trials), State: studies.Running, Began: time.Now(), Origin: origin, Point: point,
		Args: append(append([]string{}, s.FixedArgs...), s.Space.Args(point)...),
	}
}

// countAsTried returns a copy of the study in which all trials from number first on count as tried. Otherwise a study
// on a broken machine would start the default again and again. The default itself may be the reason of the failure, so
// other points must be tried.
func countAsTried(study studies.Study, first int) studies.Study {
	study.Trials = slices.Clone(study.Trials)
	for i := range study.Trials {
		if t := &study.Trials[i]; t.Number >= first && !t.Counts() {
			t.Result.Outcome, t.Result.Cause = trial.Infeasible, ""
		}
	}
	return study
}

// referenceKnown reports whether a trial of the given origin had a useful result. Other trials are compared with this
// result, so a trial that the load generator limited does not count. After maxLimited such trials, referenceKnown
// reports true, so that the study does not repeat them for ever.
func referenceKnown(study studies.Study, origin studies.Origin) bool {
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
	return limited >= maxLimited
}

// runTrial measures one trial. Each probe is stored at once. If a failure may be gone with a new server, the trial gets
// a second server before the failure counts.
func (s *Study) runTrial(ctx context.Context, t *studies.Trial, study studies.Study) (trial.Result, error) {
	result, err := s.runOnServer(ctx, t, study, lastAttempt(t.Probes))
	if changed, ok := errors.AsType[*changedError](err); ok {
		return trial.Result{Outcome: trial.Unknown, Class: serverctl.Aborted, Evidence: changed.Error(), GPUTime: trial.GPUTimeOf(t.Probes),
			Spent: result.Spent.Plus(trial.SpentOn(t.Probes))}, nil
	}
	if err == nil && result.Class.Retryable() {
		s.observe(Event{Kind: Step, Trial: *t, Step: fmt.Sprintf("once more, because it ended with %s", result.Class)})
		first, recorded, booked := result, trial.GPUTimeOf(t.Probes), trial.SpentOn(t.Probes)
		result, err = s.runOnServer(ctx, t, study, lastAttempt(t.Probes)+1)
		result.GPUTime += first.GPUTime - recorded // subtract the probes of the first server, which both results include
		result.Spent = result.Spent.Plus(first.Spent).Minus(booked)
		result.Notes = append(result.Notes, fmt.Sprintf("a first server ended with %s: %s", first.Class, first.Evidence))
	}
	if err == nil {
		err = s.blame(t, &result)
	}
	s.unknownInRow++
	if err != nil || result.Outcome != trial.Unknown || result.Class == serverctl.ClientLimited { // the server did not fail
		s.unknownInRow = 0
	}
	return result, err
}

// lastAttempt returns the highest attempt of the probes; 0 if there are none.
func lastAttempt(probes []trial.Probe) (last int) {
	for _, p := range probes {
		last = max(last, p.Attempt)
	}
	return last
}

// blame decides whether the point or the machine is the reason of a failure, if class and cause do not show it. An
// error means that the machine is broken, and ends the study. After the repair, the trial is continued.
func (s *Study) blame(t *studies.Trial, r *trial.Result) error {
	switch {
	case r.Cause.Machine():
	case r.Argparse && len(t.Point) == 0: // the point sets no flags, so these are args of every trial, and every trial would fail
	case r.Cause == serverctl.HostOOM && slices.ContainsFunc(slices.Collect(maps.Keys(t.Point)), serverctl.AsksHostMemory):
		r.Outcome = trial.Infeasible // this is the second server with these flags that found no memory
		return nil
	default:
		return nil
	}
	return fmt.Errorf("%w: %s: %s", ErrNothingStarts, serverctl.Words(r.Class, r.Cause), r.Evidence)
}

// runOnServer measures a trial on one server.
func (s *Study) runOnServer(ctx context.Context, t *studies.Trial, study studies.Study, attempt int) (trial.Result, error) {
	task := trial.Task{
		Number: t.Number, Args: t.Args, Env: t.Point.Env(), Attempt: attempt, Done: t.Probes, Budget: s.trialBudget(study, t.Origin),
		Hint:   func() float64 { return hint(study.Present(), t) },
		Booked: func(spent trial.Spent) { s.books.AddAll(spent) },
		Record: func(p trial.Probe) error {
			s.settle()
			if err := s.Store.Record(t.Number, p); err != nil {
				return err
			}
			t.Probes = append(t.Probes, p)
			s.generator.count(p)
			s.observe(Event{Kind: Probed, Trial: *t, Probe: &p})
			return nil
		},
		Accept:   func(facts serverctl.Facts) error { return s.served(study, t, facts.Version) },
		Progress: func(step string) { s.observe(Event{Kind: Step, Trial: *t, Step: step}) },
		Finish:   s.Finish,
	}
	switch {
	case t.Origin == studies.Confirmed:
		s.confirm(&task, t, study.Present())
	case s.Budget.MinGain > 0:
		task.MaxFails = maxFails
		task.Best = func() trial.Rival { return toBeat(study, t) }
		if rate := lowestFailed(study.Present()); rate > 0 { // nothing has met the SLO yet
			task.MaxFails = maxFailsAgain
			task.Hint = func() float64 { return rate }
		}
	}
	return s.Runner.Run(ctx, task)
}

// served stores the version of a trial's server. Measurements on two versions cannot be compared. So the version must
// be the same as in earlier trials, and in earlier probes of the same trial, unless the user accepts a change. If the
// server does not report a version, served does nothing.
func (s *Study) served(study studies.Study, t *studies.Trial, version string) error {
	// A half-done trial keeps the version it began with. If the user accepted a change of the version, the store has
	// this change.
	if version == "" || t.Version == version {
		return nil
	}
	before := *t
	if len(t.Probes) == 0 || t.Version == "" {
		last, _, found := lo.FindLastIndexOf(study.Trials[:t.Number], func(t studies.Trial) bool { return t.Version != "" })
		switch {
		case !found || last.Version == version && t.Version == "":
			return s.serve(t, version, studies.Change{})
		case last.Version == version: // the user accepted another version, but returned to the old one before the first probe
			return s.serve(t, version, studies.VersionChange(*t, version))
		}
		before = last
	}
	change := studies.VersionChange(before, version)
	switch {
	case !s.AcceptDrift:
		return fmt.Errorf("%w: %s; start the old version, begin a study under another name, or go on with --accept-drift", studies.ErrWorldChanged, change)
	case len(t.Probes) > 0:
		return &changedError{change}
	}
	return s.serve(t, version, change)
}

func (s *Study) serve(t *studies.Trial, version string, change studies.Change) error {
	if err := s.Store.Served(t.Number, version, change); err != nil {
		return err
	}
	t.Version = version
	return nil
}

// A changedError says that earlier probes of the trial were measured on another version of the server.
type changedError struct{ change studies.Change }

func (e *changedError) Error() string {
	return "the world changed before the trial was finished: " + e.change.String()
}

func (s *Study) observe(e Event) {
	if s.Observe != nil {
		s.Observe(e)
	}
}
