package trial

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
)

const (
	// warmUpRequests are sent at a time, as many as the manual sweeps sent in all.
	warmUpRequests = 10
	// mostWarmUps pieces, or so much time, are all that a server gets: what is not warm then is said to be cold.
	mostWarmUps = 12
	warmUpLimit = 5 * time.Minute

	// The median TPOT of a piece has fallen when it is below so much of the lower quartile of the piece before. On the simulated H200,
	// warm from its start, that is so for 1 of 343 pieces.
	tpotFall = 0.9
	// The median TTFT has fallen when it is below so much of the quickest of the piece before. It depends on the draw far more than
	// TPOT, by length of prompt, cached part and queue: there 58 of 343 medians were below half the lower quartile before.
	ttftFall = 0.5
)

// warmUp sends the first requests until the server is warm, and primes the cache where the protocol says so. It is worth nothing half
// done. What it does depends on this start of the server alone, so that a resumed trial warms up as it did.
func (m *measuring) warmUp(ctx context.Context) error {
	m.progress("warming up")
	if err := m.warmUntilSettled(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	if err := m.prime(ctx); err != nil {
		return err
	}
	now, err := m.counters(ctx)
	if err != nil {
		return err
	}
	return m.judgeDrafts(speculation(serverctl.Counters{}, now))
}

// warmUntilSettled sends pieces of load until latencies no longer fall and, where something is drafted, enough was drafted to know what
// is accepted of it. A server that is warm from its start gets two.
func (m *measuring) warmUntilSettled(ctx context.Context) error {
	began := m.result.GPUTime
	var last latencies
	settled := false
	for piece := range mostWarmUps {
		run, err := m.uncounted(ctx, counted(m.passOf(workload.WarmUpStream, piece*warmUpRequests, warmUpRequests)), nil, beforeProbes)
		if err != nil {
			return err
		}
		is := latenciesOf(run.Samples)
		settled = settled || piece > 0 && !is.fellFrom(last)
		last = is
		m.drafts.tpot = is.tpot.median
		now, err := m.counters(ctx)
		if err != nil {
			return err
		}
		lacking := m.lackingDrafts(now)
		if settled && lacking == "" {
			return nil
		}
		if piece+1 == mostWarmUps || m.result.GPUTime-began >= warmUpLimit {
			if !settled {
				lacking = join("its latencies still fell", lacking)
			}
			m.result.Notes = append(m.result.Notes, fmt.Sprintf("the server was not warm after %d requests and %.0f s: %s",
				(piece+1)*warmUpRequests, (m.result.GPUTime-began).Seconds(), lacking))
			return nil
		}
	}
	return nil
}

// join lists what is not empty.
func join(words ...string) string {
	return strings.Join(slices.DeleteFunc(words, func(w string) bool { return w == "" }), "; ")
}

// lackingDrafts says what is not known of the server's drafts yet, or nothing.
func (m *measuring) lackingDrafts(now serverctl.Counters) string {
	if m.MinAcceptance <= 0 || now.AcceptedAt == nil || now.DraftTokens >= float64(m.MinDrafted) {
		return ""
	}
	return fmt.Sprintf("only %.0f of %d tokens were drafted that it takes to know the acceptance", now.DraftTokens, m.MinDrafted)
}

// latencies are how long the requests of a piece took, in milliseconds; 0 when there is nothing to know.
type latencies struct{ ttft, tpot quantiles }

type quantiles struct{ least, quarter, median float64 }

func latenciesOf(samples []bench.Sample) latencies {
	var ttft, tpot []float64
	for _, s := range samples {
		if !s.OK() {
			continue
		}
		ttft = append(ttft, s.TTFT().Seconds()*1000)
		if each, ok := s.TPOT(); ok {
			tpot = append(tpot, each.Seconds()*1000)
		}
	}
	return latencies{quantilesOf(ttft), quantilesOf(tpot)}
}

func quantilesOf(values []float64) quantiles {
	slices.Sort(values)
	return quantiles{bench.Percentile(values, 0), bench.Percentile(values, 25), bench.Percentile(values, 50)}
}

// fellFrom reports whether a latency fell since the piece before. What is done once makes requests slower and never quicker, so a rise
// is no sign of it. The requests of two pieces differ: the median must lie clearly below what was quick before, else it is the draw.
// A piece of which only the first requests were slow was warm at its end.
func (l latencies) fellFrom(before latencies) bool {
	return l.ttft.median < ttftFall*before.ttft.least || l.tpot.median < tpotFall*before.tpot.quarter
}

// passOf is the load of n requests of a stream from the first on.
func (m *measuring) passOf(stream workload.Stream, first, n int) workload.Schedule {
	return workload.Pass{Source: m.Source, Seed: m.Seed, Stream: stream, Rate: m.primeRate(), First: first, N: n}.Schedule()
}

// counted makes a load tell its latencies, which only the requests of a window do.
func counted(schedule workload.Schedule) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for a := range schedule {
			a.Phase = workload.Window
			if !yield(a) {
				return
			}
		}
	}
}

// pass sends n requests of a stream, of which no probe knows, and waits until the server is idle again.
func (m *measuring) pass(ctx context.Context, stream workload.Stream, first, n int) error {
	_, err := m.uncounted(ctx, m.passOf(stream, first, n), nil, beforeProbes)
	return err
}

// beforeProbes says which requests those of a warm-up and of priming are.
const beforeProbes = "before the first probe"

// uncounted sends a load of which no probe knows, and waits until the server is idle again. which says which requests these are.
func (m *measuring) uncounted(ctx context.Context, schedule workload.Schedule, stop bench.Stop, which string) (bench.Run, error) {
	began := time.Now()
	run, err := m.load.Run(ctx, m.recalled(schedule), stop)
	if err != nil {
		m.result.GPUTime += time.Since(began) // spent all the same
		return run, err
	}
	m.result.GPUTime += run.Elapsed
	sent, broken, detail := run.Others+len(run.Samples), run.Broken, run.BrokenDetail
	for _, s := range run.Samples {
		if s.Failure != "" && s.Failure != bench.WrongLength { // which voids a probe, and says so better
			if broken == 0 {
				detail = fmt.Sprintf("%s: %s", s.Failure, s.Detail)
			}
			broken++
		}
	}
	if broken == sent && sent > 0 {
		return run, m.useless(ctx, fmt.Sprintf("all %d requests %s failed: %s", sent, which, detail))
	}
	if broken > 0 {
		m.result.Notes = append(m.result.Notes, fmt.Sprintf("%d of %d requests %s failed: %s", broken, sent, which, detail))
	}
	if 2*broken > sent { // on a busy machine its death is noticed later than its errors
		select {
		case <-m.server.Exited():
			return run, m.server.Err()
		case <-ctx.Done():
			return run, context.Cause(ctx)
		case <-time.After(deathNotice):
		}
	}
	drained, err := m.server.Drain(ctx)
	m.result.GPUTime += drained
	if err != nil {
		return run, serverError{err}
	}
	return run, nil
}

// deathNotice is how long a server that answers nothing well has to die, so that its own last words are the evidence.
const deathNotice = 10 * time.Second

// turnedAway are the statuses by which a server, or a gateway before it, refuses requests for what they are: no flag of the engine does.
var turnedAway = regexp.MustCompile(`http-status: (?:401|403|404|405|413|429|503)\b`)

// useless is the error of a server that is up and fails every request.
func (m *measuring) useless(ctx context.Context, evidence string) error {
	class := serverctl.CrashLoad
	if turnedAway.MatchString(evidence) {
		class = serverctl.Infrastructure
	}
	return AwaitDeath(ctx, m.server, &serverctl.ExitError{Class: class, Evidence: evidence, Code: -1})
}
