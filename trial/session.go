package trial

import (
	"context"
	"fmt"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/render"
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
	firstRate float64        // where a study begins its first search, requests per second
	briefs    map[int]*brief // Source with short answers, by the greatest number of tokens
	result    Result         // so far
}

func newSession(r *Runner, task Task, server Server, load Load) *session {
	facts := server.Facts()
	return &session{
		runner: r, task: task, server: server, load: load,
		cache: newPrefixCache(r.Cache, facts.KVCacheTokens), firstRate: r.firstRate(facts),
		result: Result{Notes: slices.Clone(r.Marks), Cache: r.Cache, Facts: facts, GPUTime: facts.StartUp},
	}
}

// If nothing is known of a server's speed, a request is assumed to have this many tokens and to take this many seconds.
const (
	defaultLength = 2048
	defaultStay   = 20.0
)

// firstRate is the Runner's Hint. Without a Hint it is the rate at which requests of 20 s each just fill the KV cache.
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

// whileItLives runs measure. If the server dies, it ends measure and returns the server's own error.
func (s *session) whileItLives(ctx context.Context, measure func(context.Context, *session) (capacity.Capacity, error)) (capacity.Capacity, error) {
	ctx, stop := until(ctx, s.server.Exited(), s.server.Err)
	defer stop()
	found, err := measure(ctx, s)
	return found, explain(ctx, s.server, err)
}

// stop stops the server, even when ctx has ended. The end of ctx only shortens the time that the server gets.
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

// beforeProbes names the requests of warm-up and priming in messages.
const beforeProbes = "before the first probe"

// pass sends n uncounted requests of a stream, beginning with the number first, and waits until the server is idle.
func (s *session) pass(ctx context.Context, stream workload.Stream, first, n int, rate float64) error {
	_, err := s.uncounted(ctx, s.passOf(s.runner.Source, stream, first, n, rate), nil, beforeProbes)
	return err
}

func (s *session) passOf(source workload.Source, stream workload.Stream, first, n int, rate float64) workload.Schedule {
	return workload.Pass{Source: source, Seed: s.runner.Seed, Stream: stream, Rate: rate, First: first, N: n}.Schedule()
}

// uncounted sends a load that belongs to no probe, and waits until the server is idle. Messages name its requests by
// the text in the parameter which.
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
		run.Elapsed = time.Since(began) // a load that ends with an error costs time too
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

// checkAnswers adds a note if requests of an uncounted load failed. If most of them failed, the server may be dying, so
// it waits some time for the server's death.
func (s *session) checkAnswers(ctx context.Context, run bench.Run, which string) error {
	sent, broken, detail, status := run.Others+len(run.Samples), run.Broken, run.BrokenDetail, run.BrokenStatus
	for _, sample := range run.Samples {
		if sample.Failure != "" && sample.Failure != bench.WrongLength { // a wrong length voids the first probe, whose error explains it
			if broken == 0 {
				detail, status = fmt.Sprintf("%s: %s", sample.Failure, sample.Detail), sample.Status
			}
			broken++
		}
	}
	if broken == sent && sent > 0 {
		return useless(ctx, s.server, status, fmt.Sprintf("%s %s failed: %s", render.All(sent, "request"), which, detail))
	}
	if broken > 0 {
		s.note("%s %s failed: %s", render.Of(broken, sent, "request"), which, detail)
	}
	if 2*broken <= sent {
		return nil
	}
	return AwaitDeath(ctx, s.server, nil)
}

// alive asks the server for two tokens after a load in which no request was completed. Such a probe may have ended
// before anybody noticed that the server hangs. Its requests were withdrawn, so none of them can show this any more.
// One token is not enough, because some servers hang after the first. If both tokens come, the server is only slow, and
// its probe counts. Otherwise the server is at fault, and no limit was broken.
func (s *session) alive(ctx context.Context, run bench.Run) error {
	if !run.Silent() {
		return nil
	}
	s.task.progress("no request was completed; asking the server for two tokens")
	one := *s.runner.Source.Request(workload.WarmUpStream.Draw(2), 0) // no probe sends this request
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
			return useless(ctx, s.server, sample.Status, fmt.Sprintf("no request was completed, and a single request sent afterwards failed too: %s: %s", sample.Failure, sample.Detail))
		}
	}
	return AwaitDeath(ctx, s.server, &serverctl.ExitError{Class: serverctl.Hang, Cause: serverctl.NoToken, Code: -1,
		Evidence: fmt.Sprintf("no request was completed under load, and a single request afterwards was not completed within %.0f s", last.Elapsed.Seconds())})
}
