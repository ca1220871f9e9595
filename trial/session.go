package trial

import (
	"context"
	"fmt"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/trial/capacity"
)

// A session is one started server and the load that reaches it. It adds up what the server costs, and collects the
// notes.
type session struct {
	runner    *Runner
	task      Task
	server    Server
	load      Load
	cache     *prefixCache
	firstRate float64 // where a study begins its first search, requests per second
	result    Result  // so far
}

func newSession(r *Runner, task Task, server Server, load Load) *session {
	facts := server.Facts()
	return &session{
		runner: r, task: task, server: server, load: load,
		cache: newPrefixCache(r.Cache, facts.KVCacheTokens), firstRate: r.firstRate(facts),
		result: Result{Notes: slices.Clone(r.Marks), Cache: r.Cache, Facts: facts, GPUTime: facts.StartUp},
	}
}

// Where nothing is known of a server's speed, a request is assumed to have this many tokens and to take this many
// seconds.
const (
	defaultLength = 2048
	defaultStay   = 20.0
)

// firstRate is the Runner's own hint, or the rate at which requests of 20 s just fill the KV cache.
func (r *Runner) firstRate(facts serverctl.Facts) float64 {
	if r.Search.Hint > 0 {
		return r.Search.Hint
	}
	length := r.Source.Longest()
	if length == 0 {
		length = defaultLength
	}
	return max(r.Search.Min, float64(facts.KVCacheTokens)/float64(length)/defaultStay)
}

// whileItLives runs measure, and ends it with the server's own error when the server dies.
func (s *session) whileItLives(ctx context.Context, measure func(context.Context, *session) (capacity.Capacity, error)) (capacity.Capacity, error) {
	ctx, stop := until(ctx, s.server.Exited(), s.server.Err)
	defer stop()
	found, err := measure(ctx, s)
	return found, explain(ctx, s.server, err)
}

// stop stops the server. The end of ctx shortens the time that the server gets, and does nothing else.
func (s *session) stop(ctx context.Context) error {
	ended, err := s.server.Stop(ctx)
	s.result.Ended = ended
	s.result.GPUTime += ended.Took
	if ended.LogError != "" {
		s.note("the server's log is incomplete: %s", ended.LogError)
	}
	return err
}

func (s *session) note(format string, args ...any) {
	s.result.Notes = append(s.result.Notes, fmt.Sprintf(format, args...))
}

func (s *session) send(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	return s.load.Run(ctx, s.cache.recall.watch(schedule), stop)
}

// beforeProbes names the requests of warm-up and priming.
const beforeProbes = "before the first probe"

// pass sends n uncounted requests of a stream, from the first on, and waits until the server is idle.
func (s *session) pass(ctx context.Context, stream workload.Stream, first, n int, rate float64) error {
	_, err := s.uncounted(ctx, passOf(s.runner, stream, first, n, rate), nil, beforeProbes)
	return err
}

func passOf(r *Runner, stream workload.Stream, first, n int, rate float64) workload.Schedule {
	return workload.Pass{Source: r.Source, Seed: r.Seed, Stream: stream, Rate: rate, First: first, N: n}.Schedule()
}

// uncounted sends a load that belongs to no probe, and waits until the server is idle. Error messages
// name its requests by the word which.
func (s *session) uncounted(ctx context.Context, schedule workload.Schedule, stop bench.Stop, which string) (bench.Run, error) {
	run, err := s.timed(ctx, schedule, stop)
	if err == nil {
		err = s.checkAnswers(ctx, run, which)
	}
	if err != nil {
		return run, err
	}
	return run, s.idle(ctx)
}

// timed sends a load, and counts its GPU time.
func (s *session) timed(ctx context.Context, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	began := time.Now()
	run, err := s.send(ctx, schedule, stop)
	if err != nil {
		run.Elapsed = time.Since(began) // a load that fails costs time too
	}
	s.result.GPUTime += run.Elapsed
	return run, err
}

// idle waits until the server is idle, and counts its GPU time.
func (s *session) idle(ctx context.Context) error {
	took, err := drain(ctx, s.server)
	s.result.GPUTime += took
	return err
}

// checkAnswers notes failed requests of an uncounted load. Where most have failed the server may be dying, and gets
// some time for it.
func (s *session) checkAnswers(ctx context.Context, run bench.Run, which string) error {
	sent, broken, detail := run.Others+len(run.Samples), run.Broken, run.BrokenDetail
	for _, sample := range run.Samples {
		if sample.Failure != "" && sample.Failure != bench.WrongLength { // a wrong length voids the first probe, whose error explains it
			if broken == 0 {
				detail = fmt.Sprintf("%s: %s", sample.Failure, sample.Detail)
			}
			broken++
		}
	}
	if broken == sent && sent > 0 {
		return useless(ctx, s.server, fmt.Sprintf("all %d requests %s failed: %s", sent, which, detail))
	}
	if broken > 0 {
		s.note("%d of %d requests %s failed: %s", broken, sent, which, detail)
	}
	if 2*broken <= sent {
		return nil
	}
	return AwaitDeath(ctx, s.server, nil)
}

// alive asks the server for two tokens after a load that ended in silence. A probe may end before anybody notices that
// the server hangs, and it withdraws its requests, so nothing is left that could hang. Some servers hang after the
// first token. A server that makes both tokens is slow, and its probe counts. Otherwise the fault is the server's and
// no limit was broken.
func (s *session) alive(ctx context.Context, run bench.Run) error {
	if !run.Silent() {
		return nil
	}
	s.task.progress("no request was completed; asking the server for two tokens")
	one := *s.runner.Source.Request(workload.WarmUpStream.Draw(2), 0) // no probe asks this one
	one.OutputTokens = min(2, one.OutputTokens)
	last, err := s.timed(ctx, atOnce([]workload.Request{one}), nil)
	if err != nil {
		return err
	}
	for _, sample := range last.Samples {
		switch {
		case sample.OK():
			return s.idle(ctx)
		case sample.Failure != "" && sample.Failure != bench.TimedOut && sample.Failure != bench.NeverFinished:
			return useless(ctx, s.server, fmt.Sprintf("no request was completed, and one more failed too: %s: %s", sample.Failure, sample.Detail))
		}
	}
	return AwaitDeath(ctx, s.server, &serverctl.ExitError{Class: serverctl.Hang, Cause: serverctl.NoToken, Code: -1,
		Evidence: fmt.Sprintf("no request was completed under load, nor was one more within %.0f s", last.Elapsed.Seconds())})
}
