package trial

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/trial/slo"
)

// An offer is the load of one probe. It also says which part of the load is counted.
type offer struct {
	Level
	schedule workload.Schedule
	planned  int           // counted requests
	leadIn   time.Duration // time from the start of the load to the start of the window; unused in a closed loop
	window   time.Duration // length of the window; unused in a closed loop
	stop     bench.Stop    // ends the probe early; nil means that nothing does
}

// probe prepares the prefix cache, sends one load, and judges the answers.
func (s *session) probe(ctx context.Context, seq int, o offer) (Probe, error) {
	s.task.progress("probe %d at %s", seq+1, o.Level)
	began := time.Now()
	if err := s.cache.prepare(ctx, s.server); err != nil {
		return Probe{}, err
	}
	emptied := s.books.Took(began)
	before, err := readCounters(ctx, s.server)
	if err != nil {
		return Probe{}, err
	}
	if err := workload.Enough(s.runner.Source, o.planned); err != nil {
		return Probe{}, fmt.Errorf("probe at %s: %w", o.Level, err)
	}
	endSeries := s.server.Observe(time.Now())
	run, err := s.sendOffer(ctx, o)
	series := endSeries()
	if err != nil {
		return Probe{}, fmt.Errorf("probe at %s: %w", o.Level, err)
	}
	drained, err := drain(ctx, s.server)
	if err != nil {
		return Probe{}, err
	}
	after, err := readCounters(ctx, s.server)
	if err != nil {
		return Probe{}, err
	}
	p, err := s.judged(seq, o, run)
	if err != nil {
		return Probe{}, err
	}
	p.HitRate, p.Preemptions = hitRate(before, after), after.Preemptions-before.Preemptions
	p.GPUTime, p.Server, p.Speculation = run.Elapsed+drained, series, speculation(before, after)
	p.Spent = o.parts(run.Elapsed, drained)
	if s.runner.Cache == Reset && emptied > 0 {
		p.Spent[Emptying] = emptied
	}
	if unknown := s.cache.judge(p, before, after); unknown != "" {
		s.note("the state of the prefix cache was not verified: %s", unknown)
	}
	return p, s.checkAlive(ctx, run)
}

// parts divides the time of a load into its parts. The run-out includes the time until the server was idle. A closed
// loop has no lead-in and no run-out.
func (o offer) parts(elapsed, drained time.Duration) Spent {
	leadIn, window := min(o.leadIn, elapsed), o.window
	if o.Streams > 0 {
		window = elapsed
	}
	window = min(window, elapsed-leadIn)
	return Spent{}.Plus(Spent{LeadIn: leadIn, Windows: window, RunOut: elapsed - leadIn - window + drained})
}

// sendOffer sends a load in an open or a closed loop.
func (s *session) sendOffer(ctx context.Context, o offer) (bench.Run, error) {
	if o.Streams == 0 {
		return s.send(ctx, o.schedule, o.stop)
	}
	closed, ok := s.load.(ClosedLoad)
	if !ok {
		return bench.Run{}, errors.New("this load generator has no closed loop; give rates")
	}
	return closed.RunClosed(ctx, s.cache.recall.watch(o.schedule), o.Streams, o.stop)
}

// judged returns the probe with the figures from its requests. The caller adds the figures from the server's counters.
func (s *session) judged(seq int, o offer, run bench.Run) (Probe, error) {
	scope := bench.Scope{Rate: o.Rate, Start: o.leadIn, Length: o.window, Natural: s.runner.Natural, Sketches: true}
	if o.Streams > 0 {
		scope = scope.ByCount(run)
	}
	measurement := bench.Measure(run, scope)
	if measurement.Void != "" {
		return Probe{}, fmt.Errorf("probe at %s is void: %s", o.Level, measurement.Void)
	}
	verdict := s.runner.SLO.Judge(run.Samples, o.planned, run.Elapsed)
	if run.Stalled > 0 && !verdict.Pass && verdict.ClientLimited == "" {
		verdict.ClientLimited = fmt.Sprintf("the tuner itself stalled for %.1f s", run.Stalled.Seconds())
	}
	return Probe{
		Seq: seq, Rate: o.Rate, Streams: o.Streams, Stopped: run.Stopped, Attempt: s.task.Attempt,
		Measurement: measurement, Verdict: verdict, Note: noteOf(measurement, verdict, run),
	}, nil
}

// noteOf returns what a reader must know before trusting a probe.
func noteOf(m bench.Measurement, v slo.Verdict, run bench.Run) string {
	for _, s := range run.Samples {
		if s.Failure != "" {
			return fmt.Sprintf("%s failed, the first with %s: %s", render.Count(m.Failed, "request"), s.Failure, s.Detail)
		}
	}
	if run.Broken > 0 {
		return fmt.Sprintf("%s failed; first error: %s", render.Of(run.Broken, run.Others, "uncounted request"), run.BrokenDetail)
	}
	if v.ClientLimited != "" {
		return "client-limited: " + v.ClientLimited
	}
	return ""
}

// recorded measures a probe and stores it. If the user has ended the trial, it returns ErrInterrupted instead.
func (s *session) recorded(measure func() (Probe, error)) (Probe, error) {
	if err := s.task.finished(); err != nil {
		return Probe{}, err
	}
	s.settle(Idling)
	began, before := time.Now(), s.result.GPUTime
	p, err := measure()
	if err != nil { // a probe that ends with an error costs GPU time too; checkAlive has already counted its own request
		s.result.GPUTime = max(s.result.GPUTime+p.GPUTime, before+time.Since(began))
		s.books.Add(Lost, p.GPUTime)
		s.settle(Lost)
		return p, err
	}
	s.books.AddAll(p.Spent)
	s.settle(Idling)
	if err := s.task.Record(p); err != nil {
		return p, fmt.Errorf("record probe %d at %s: %w", p.Seq, p.Level(), err)
	}
	return p, nil
}

// verified measures a probe. If the prefix cache was in the wrong state, it measures the probe again. If the state is
// wrong in the repetition too, later probes are not repeated. To repeat them would double the cost of a trial and
// change nothing.
func (s *session) verified(measure func(again bool) (Probe, error)) (Probe, error) {
	p, err := measure(false)
	wrong := s.cache.wrong
	if err != nil || wrong == "" {
		return p, err
	}
	if s.cache.alwaysWrong {
		p.Note = join(wrong, p.Note)
		return p, nil
	}
	p, err = s.repeat(p, wrong, func() (Probe, error) { return measure(true) })
	if err != nil {
		return p, err
	}
	note := "measured again, because " + wrong
	if s.cache.wrong != "" {
		s.cache.alwaysWrong = true
		note = "measured again, and again " + s.cache.wrong
	}
	p.Note = join(note, p.Note)
	return p, nil
}

// repeat measures a probe again and replaces it. The GPU time of both measurements counts.
func (s *session) repeat(first Probe, why string, measure func() (Probe, error)) (Probe, error) {
	s.task.progress("again: %s", why)
	p, err := measure()
	p.GPUTime += first.GPUTime
	p.Replaced += first.GPUTime
	p.Spent = p.Spent.Plus(first.Spent)
	return p, err
}

// speculation returns what was drafted and accepted between two readings of the counters, or nil if nothing was
// drafted.
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

// hitRate returns the fraction of prompt tokens, 0 to 1, that were found in the prefix cache; -1 if none were looked
// up.
func hitRate(before, after serverctl.Counters) float64 {
	queries := after.PrefixQueries - before.PrefixQueries
	if queries <= 0 {
		return -1
	}
	return (after.PrefixHits - before.PrefixHits) / queries
}

// join joins the texts that are not empty.
func join(texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(t string) bool { return t == "" }), "; ")
}
