package trial

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// ErrInterrupted is returned by Run when it was told to finish: what was recorded stands, the rest is to be done.
var ErrInterrupted = errors.New("interrupted between two probes")

// Lengths are how long a probe is.
type Lengths struct {
	LeadIn      time.Duration // uncounted load before the window
	Window      time.Duration // at least so long
	MinRequests int           // and at least so many requests
}

// A Runner measures points, one after the other, all in the same way.
type Runner struct {
	Start     Start
	Source    workload.Source
	SLO       slo.SLO
	Lengths   Lengths
	Cache     Protocol
	PrimeRate float64         // requests per second while a cache is primed
	Search    capacity.Search // its Hint is that of the first trial; 0 means from the size of the KV cache
	Seed      uint64          // of requests and arrivals, the same in every trial
	Arrivals  workload.Arrivals
	Natural   bool     // answers end where the model ends them, so that no length is off plan
	Marks     []string // what a reader must know of every result
	Simulated bool     // no GPU is behind the servers, one that fails before it can say so among them

	// A server that drafts and of whose drafts less than MinAcceptance (accepted / drafted tokens) is accepted, once MinDrafted are
	// known, is measured no further; 0 asks for nothing.
	MinAcceptance float64
	MinDrafted    int

	WorstCase bool // a server that was measured must survive the largest load that it admits

	inLongRun *longRun // of Source; nil until it is wanted
}

// A Task is one trial to run.
type Task struct {
	Number int
	Args   []string       // all args of the server after the model
	Hint   func() float64 // where to begin the search, asked once Accept has seen the server; nil or 0 mean the Runner's
	Draw   int            // of its first probe; a measurement that is to be independent of another begins with one that has not been
	Done   []Probe        // measured before an interruption: used again, not repeated
	// Attempt counts the servers that were to measure the trial, from 0. What a late load generator decided in earlier attempts is
	// measured again.
	Attempt int
	Record  func(Probe) error

	Accept   func(serverctl.Facts) error // asked when the server is ready; its error ends the trial and is Run's; nil accepts any
	Progress func(step string)           // told what begins now; nil means silent
	Finish   <-chan struct{}             // closed: finish the probe at hand, if there is one, then return ErrInterrupted
}

// Run measures one point. A server that fails is a result; an error is something that no other point would cure, or the
// end of ctx. The server is gone when Run returns.
func (r *Runner) Run(ctx context.Context, task Task) (Result, error) {
	return r.onServer(ctx, task, (*measuring).measure)
}

// onServer starts the task's server, measures with it, and ends it.
func (r *Runner) onServer(ctx context.Context, task Task, measure func(*measuring, context.Context) (capacity.Capacity, error)) (result Result, err error) {
	task.progress("starting the server")
	result = Result{Notes: slices.Clone(r.Marks), Facts: serverctl.Facts{Simulated: r.Simulated}}
	began := time.Now()
	server, load, err := r.startServer(ctx, task)
	if err != nil {
		result.GPUTime = time.Since(began)
		return failure(result, ctx, err)
	}
	m := &measuring{Runner: r, Task: task, server: server, load: load, result: result, firstRate: r.firstRate(server.Facts())}
	m.result.Facts, m.result.GPUTime = server.Facts(), server.Facts().StartUp
	capacity, runErr := measure(m, ctx)
	ended, stopErr := server.Stop(ctx) // whose end cuts the server's grace short, and nothing else
	m.result.Ended = ended
	m.result.GPUTime += ended.Took
	if ended.LogError != "" {
		m.result.Notes = append(m.result.Notes, "the server's log is incomplete: "+ended.LogError)
	}
	if stopErr != nil { // nobody's fault: the next server could not be measured beside what is left of this one
		return m.result, errors.Join(runErr, fmt.Errorf("stop the server of trial %d: %w", task.Number, stopErr))
	}
	if runErr != nil {
		return failure(m.result, ctx, runErr)
	}
	m.result.Outcome, m.result.Capacity = Measured, capacity
	if capacity.Limited != "" {
		m.result.Class, m.result.Evidence = serverctl.ClientLimited, capacity.Why
	}
	return m.result, nil
}

// startServer starts the trial's server. A start is worth nothing half done, so an orderly end does not wait for it.
func (r *Runner) startServer(ctx context.Context, task Task) (Server, Load, error) {
	ctx, stop := until(ctx, task.Finish, func() error { return ErrInterrupted })
	defer stop()
	server, load, err := r.Start(ctx, Launch{Number: task.Number, Args: task.Args, Progress: func(step string) { task.progress("%s", step) }})
	if err != nil && errors.Is(context.Cause(ctx), ErrInterrupted) {
		return nil, nil, ErrInterrupted
	}
	return server, load, err
}

// until returns a context that also ends when done is closed, with that cause, and what releases it.
func until(ctx context.Context, done <-chan struct{}, cause func() error) (context.Context, func()) {
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

// failure turns a server's failure into a result, and leaves other errors as they are.
func failure(result Result, ctx context.Context, err error) (Result, error) {
	if errors.Is(err, capacity.ErrLimited) { // this machine's fault, not the point's
		result.Outcome, result.Class, result.Evidence = Unknown, serverctl.ClientLimited, err.Error()
		return result, nil
	}
	if rejected, ok := errors.AsType[*rejectedDrafts](err); ok && ctx.Err() == nil {
		result.Outcome, result.Class, result.Evidence = Dropped, serverctl.AcceptanceNearZero, rejected.Error()
		return result, nil
	}
	exit, ok := errors.AsType[*serverctl.ExitError](err)
	if !ok || ctx.Err() != nil {
		return result, err
	}
	if exit.Fatal() {
		err = fmt.Errorf("no choice of flags would cure this: %w", err)
		if remedy := serverctl.Remedy(exit.Class, exit.Cause); remedy != "" {
			err = fmt.Errorf("%w; %s", err, remedy)
		}
		return result, err
	}
	result.Outcome, result.Class, result.Cause, result.Evidence, result.Tail = Unknown, exit.Class, exit.Cause, exit.Evidence, exit.Tail
	result.GPUTime = max(result.GPUTime, exit.Took)
	if exit.Class.PointsFault() {
		result.Outcome = Infeasible
	}
	return result, nil
}

func (t Task) progress(format string, args ...any) {
	if t.Progress != nil {
		t.Progress(fmt.Sprintf(format, args...))
	}
}

// measuring is the state of one Run.
type measuring struct {
	*Runner
	Task
	server    Server
	load      Load
	firstRate float64 // where the first search of the study begins, requests per second
	result    Result
	fresh     int           // probes measured by this Run
	runOut    time.Duration // the longest so far
	whole     bool          // probes are to tell of the boundary, and not only on which side of it they are: none ends early
	drafts    drafts
	cache     cacheState

	worstShown bool // a probe has shown the server under the largest load that it admits
}

// Where nothing is known of a server's speed, a request is taken to be this long in tokens and to stay for so many seconds.
const (
	usualLength = 2048
	usualStay   = 20.0
)

// firstRate is the Runner's own hint, or as many requests as fit the KV cache at a time, each for its usual stay.
func (r *Runner) firstRate(facts serverctl.Facts) float64 {
	if r.Search.Hint > 0 {
		return r.Search.Hint
	}
	length := r.Source.Longest()
	if length == 0 {
		length = usualLength
	}
	return max(r.Search.Min, float64(facts.KVCacheTokens)/float64(length)/usualStay)
}

// measure warms the server up, brings its cache into the protocol's state and searches for the capacity. It ends at once
// when the server dies, with the server's own error, and when hardly anything that it drafts is accepted.
func (m *measuring) measure(ctx context.Context) (capacity.Capacity, error) {
	ctx, stop := until(ctx, m.server.Exited(), m.server.Err)
	defer stop()
	if m.Accept != nil {
		if err := m.Accept(m.server.Facts()); err != nil {
			return capacity.Capacity{}, err
		}
	}
	if err := m.unlessFinished(ctx, m.warmUp); err != nil {
		return capacity.Capacity{}, m.cause(ctx, err)
	}
	known, err := m.known()
	if err != nil {
		return capacity.Capacity{}, m.cause(ctx, err)
	}
	found, err := m.search(known).Find(ctx, m.probe)
	if err != nil || !found.Met() {
		return found, m.cause(ctx, err)
	}
	return found, m.unlessFinished(ctx, m.surviveWorstCase)
}

// known are the steps that were measured before an interruption.
func (m *measuring) known() (steps []capacity.Step, err error) {
	for _, p := range m.Done {
		m.result.GPUTime += p.GPUTime
		m.keepRunOut(p)
		if p.Verdict.ClientLimited == "" || p.Attempt == m.Attempt {
			steps = append(steps, capacity.Step{Rate: p.Rate, Outcome: m.outcome(p)})
		}
		err = errors.Join(err, m.learn(p))
	}
	return steps, err
}

// search is the Runner's search from where this trial begins it.
func (m *measuring) search(known []capacity.Step) capacity.Search {
	search := m.Search
	search.Known, search.Population = known, m.longRun().population
	search.Cost = m.cost
	search.Plan = func(f capacity.Forecast) {
		m.whole = f.Probes > 0
		if m.Search.Plan != nil {
			m.Search.Plan(f)
		}
	}
	if m.Hint != nil {
		search.Hint = cmp.Or(m.Hint(), search.Hint)
	}
	if search.Hint == 0 {
		search.Hint = m.firstRate
	}
	return search
}

// A serverError is a question that the server did not answer. Mostly that is the first sign of its death.
type serverError struct{ error }

func (e serverError) Unwrap() error { return e.error }

// cause prefers the server's death to the errors that follow from it.
func (m *measuring) cause(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if exit, ok := errors.AsType[*serverctl.ExitError](context.Cause(ctx)); ok {
		return exit
	}
	if _, ok := errors.AsType[*serverctl.ExitError](err); ok {
		return err
	}
	if _, ok := errors.AsType[serverError](err); ok && ctx.Err() == nil {
		return AwaitDeath(ctx, m.server, &serverctl.ExitError{Class: serverctl.Infrastructure, Evidence: err.Error(), Code: -1})
	}
	return err
}

// AwaitDeath gives a server that behaves as if it were dying some time to do so, and returns its own last words, or otherwise.
func AwaitDeath(ctx context.Context, server Server, otherwise *serverctl.ExitError) error {
	select {
	case <-server.Exited():
		return server.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(deathNotice):
		return otherwise
	}
}

// probe measures one rate.
func (m *measuring) probe(ctx context.Context, rate float64) (capacity.Outcome, error) {
	seq := len(m.Done) + m.fresh
	m.fresh++
	select {
	case <-m.Finish:
		return capacity.Outcome{}, ErrInterrupted
	default:
	}
	began := time.Now()
	p, err := m.verified(func(again bool) (Probe, error) { return m.measureRate(ctx, seq, rate, again) })
	if err != nil {
		m.result.GPUTime += time.Since(began) // spent all the same
		return capacity.Outcome{}, err
	}
	if err := m.Record(p); err != nil {
		return capacity.Outcome{}, fmt.Errorf("record probe %d at %g req/s: %w", seq, rate, err)
	}
	m.result.GPUTime += p.GPUTime
	m.keepRunOut(p)
	return m.outcome(p), m.learn(p)
}

// outcome is a probe as the search sees it.
func (m *measuring) outcome(p Probe) capacity.Outcome {
	o := outcome(p)
	plan := m.plan(m.drawOf(p.Seq, p.Replaced > 0), p.Rate)
	o.Evidence = EvidenceOf(plan.Schedule(), m.longRun().weigher, p.Rate, plan.Draw, m.SLO, p.Verdict)
	return o
}

// outcome is a probe as a sweep sees it.
func outcome(p Probe) capacity.Outcome {
	v := p.Verdict
	return capacity.Outcome{
		Pass: Passed(v, p.Measurement), Headroom: v.Headroom, Binding: v.Binding, InFlight: p.Measurement.MeanInFlight, Limited: v.ClientLimited, Took: p.GPUTime,
	}
}

// mostBehind is how late the load generator may be at p99 for its rate to count as offered, as a part of the window: one that falls
// behind through a whole window offers less than was planned, and what passes then says nothing of the planned rate.
const mostBehind = 0.01

// Passed reports whether the SLO was kept at the planned rate. Where the load generator was too late for a verdict, the rate as a whole must
// have been offered, however late single requests were.
func Passed(v slo.Verdict, m bench.Measurement) bool {
	return v.Pass && (v.ClientLimited == "" || m.Window <= 0 || m.SendLag.P99 <= mostBehind*m.Window.Seconds()*1000)
}

// A longRun is the workload as it is in the long run, which is the same for every trial of a Runner.
type longRun struct {
	weigher    *workload.Weigher
	population *capacity.Population
}

// longRun builds the long run when it is first needed.
func (r *Runner) longRun() *longRun {
	if r.inLongRun == nil {
		weigher := workload.Weigh(r.Source)
		plan := workload.Plan{Source: r.Source, Seed: r.Seed, Arrivals: r.Arrivals}
		r.inLongRun = &longRun{weigher, PopulationOf(plan, weigher)}
	}
	return r.inLongRun
}

// plan is the load of a trial's probe, by the number of its draw. Each has a draw of its own, the same in every trial: what one draw
// has too many bursts of others have not, no probe meets in the cache what the one before has left of the same requests, and two
// trials still differ by their servers alone.
func (m *measuring) plan(draw int, rate float64) workload.Plan {
	return workload.Plan{
		Source: m.Source, Seed: m.Seed, Rate: rate, Draw: m.Draw + draw,
		LeadIn: m.Lengths.LeadIn, Window: m.Lengths.Window, MinRequests: m.Lengths.MinRequests, Arrivals: m.Arrivals,
	}
}

// keepRunOut remembers the longest run-out.
func (m *measuring) keepRunOut(p Probe) {
	if !p.Stopped {
		m.runOut = max(m.runOut, p.GPUTime-p.Replaced-m.Lengths.LeadIn-p.Measurement.Window)
	}
}

// cost is what a probe takes of the server, with a run-out as long as those so far.
func (m *measuring) cost(rate float64) time.Duration {
	_, window := m.plan(0, rate).Counted()
	return m.Lengths.LeadIn + window + m.runOut
}

// measureRate is one probe: cache state, lead-in, window, run-out, verdict; again when it replaces another.
func (m *measuring) measureRate(ctx context.Context, seq int, rate float64, again bool) (Probe, error) {
	plan := m.plan(m.drawOf(seq, again), rate)
	n, window := plan.Counted()
	o := offer{Level: Level{Rate: rate}, schedule: plan.Schedule(), planned: n, leadIn: plan.LeadIn, window: window}
	if m.Cache == Reset {
		o.schedule = workload.WithColdLeadIn(o.schedule, m.Source)
	}
	if !m.whole {
		o.stop = m.SLO.Stop(n)
	}
	return m.measureLoad(ctx, seq, o)
}

// An offer is one load with what of it is counted.
type offer struct {
	Level
	schedule workload.Schedule
	planned  int           // counted requests
	leadIn   time.Duration // where the window begins; not of a closed loop
	window   time.Duration // likewise
	stop     bench.Stop    // nil means never
}

// measureLoad brings the cache into its state, sends one load, and judges it.
func (m *measuring) measureLoad(ctx context.Context, seq int, o offer) (Probe, error) {
	m.progress("probe %d at %s", seq+1, o.Level)
	if err := m.prepareCache(ctx); err != nil {
		return Probe{}, err
	}
	before, err := m.counters(ctx)
	if err != nil {
		return Probe{}, err
	}
	if err := workload.Enough(m.Source, o.planned); err != nil {
		return Probe{}, fmt.Errorf("probe at %s: %w", o.Level, err)
	}
	endSeries := m.server.Observe(time.Now())
	m.cache.begin()
	run, err := m.send(ctx, o)
	series := endSeries()
	if err != nil {
		return Probe{}, fmt.Errorf("probe at %s: %w", o.Level, err)
	}
	drained, err := m.server.Drain(ctx)
	if err != nil {
		return Probe{}, serverError{err}
	}
	after, err := m.counters(ctx)
	if err != nil {
		return Probe{}, err
	}
	scope := bench.Scope{Rate: o.Rate, Start: o.leadIn, Length: o.window, Natural: m.Natural, Sketches: true}
	if o.Streams > 0 {
		scope = scope.ByNumber(run)
	}
	measurement := bench.Measure(run, scope)
	if measurement.Void != "" {
		return Probe{}, fmt.Errorf("probe at %s is void: %s", o.Level, measurement.Void)
	}
	p := Probe{
		Seq: seq, Rate: o.Rate, Streams: o.Streams, Stopped: run.Stopped, Attempt: m.Attempt,
		Measurement: measurement,
		Verdict:     m.SLO.Judge(run.Samples, o.planned, run.Elapsed),
		HitRate:     hitRate(before, after),
		Preemptions: after.Preemptions - before.Preemptions,
		GPUTime:     run.Elapsed + drained,
		Server:      series,
		Speculation: speculation(before, after),
	}
	if run.Stalled > 0 && !p.Verdict.Pass && p.Verdict.ClientLimited == "" {
		p.Verdict.ClientLimited = fmt.Sprintf("the tuner itself stood still for %.1f s", run.Stalled.Seconds())
	}
	p.Note = m.note(p, run)
	m.judgeCache(p, before, after)
	return p, m.alive(ctx, run)
}

// send sends a load in an open or a closed loop.
func (m *measuring) send(ctx context.Context, o offer) (bench.Run, error) {
	schedule := m.recalled(o.schedule)
	if o.Streams == 0 {
		return m.load.Run(ctx, schedule, o.stop)
	}
	closed, ok := m.load.(ClosedLoad)
	if !ok {
		return bench.Run{}, errors.New("this load generator has no closed loop; give rates")
	}
	return closed.RunClosed(ctx, schedule, o.Streams, o.stop)
}

func (m *measuring) counters(ctx context.Context) (serverctl.Counters, error) {
	c, err := m.server.Counters(ctx)
	if err != nil {
		return c, serverError{fmt.Errorf("read the server's counters: %w", err)}
	}
	return c, nil
}

// note says what a reader must know before believing the probe.
func (m *measuring) note(p Probe, run bench.Run) string {
	for _, s := range run.Samples {
		if s.Failure != "" {
			return fmt.Sprintf("%d requests failed, the first with %s: %s", p.Measurement.Failed, s.Failure, s.Detail)
		}
	}
	if run.Broken > 0 {
		return fmt.Sprintf("%d of %d uncounted requests failed, the first: %s", run.Broken, run.Others, run.BrokenDetail)
	}
	if limited := p.Verdict.ClientLimited; limited != "" {
		return "client-limited: " + limited
	}
	return ""
}

// speculation is what was drafted and accepted between two looks at the counters; nil when nothing was.
func speculation(before, after serverctl.Counters) *Speculation {
	if after.Drafts <= before.Drafts {
		return nil
	}
	s := &Speculation{
		Drafts: after.Drafts - before.Drafts, Tokens: after.DraftTokens - before.DraftTokens,
		Accepted: after.AcceptedTokens - before.AcceptedTokens, At: slices.Clone(after.AcceptedAt),
	}
	for i := range min(len(s.At), len(before.AcceptedAt)) {
		s.At[i] -= before.AcceptedAt[i]
	}
	return s
}

func hitRate(before, after serverctl.Counters) float64 {
	queries := after.PrefixQueries - before.PrefixQueries
	if queries <= 0 {
		return -1
	}
	return (after.PrefixHits - before.PrefixHits) / queries
}
