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
	runner       *Runner
	task         Task
	server       Server
	load         Load
	cache        *prefixCache
	firstRate    float64              // rate at which a study begins its first search, requests per second
	shortSources map[int]*shortSource // the workload with shortened answers, by the maximum length of an answer in tokens
	books        *Books
	result       Result // the trial's result so far
}

// newSession begins the session of a server that is ready. The books were opened before the server's start.
func newSession(r *Runner, task Task, server Server, load Load, books *Books) *session {
	facts := server.Facts()
	s := &session{
		runner: r, task: task, server: server, load: load, books: books,
		cache: newPrefixCache(r.Cache, facts.KVCacheTokens, !r.KnownCache), firstRate: r.firstRate(facts),
		result: Result{
			Notes: slices.Clone(r.Marks), Cache: r.Cache, Facts: facts, GPUTime: facts.StartUp + GPUTimeOf(task.Done), Spent: SpentOn(task.Done),
		},
	}
	for _, name := range facts.UnknownVariables {
		s.note("the server does not know %s, so this variable has no effect", name)
	}
	if facts.Virtual {
		*books = Books{}
	}
	books.Add(Starting, facts.StartUp)
	s.settle(Starting)
	return s
}

// settle books the time since its last call that nobody else has booked. This time counts as the part rest. settle also
// reports to the task everything booked since then.
func (s *session) settle(rest Part) {
	spent := s.books.Settle(rest)
	s.result.Spent = s.result.Spent.Plus(spent)
	s.task.booked(spent)
}

// spend adds GPU time to the trial, and books it.
func (s *session) spend(part Part, d time.Duration) {
	s.result.GPUTime += d
	s.books.Add(part, d)
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

// whileServerLives runs a measurement. If the server dies, it cancels the measurement and returns the server's own
// error.
func (s *session) whileServerLives(ctx context.Context, measure func(context.Context, *session) (capacity.Capacity, error)) (capacity.Capacity, error) {
	ctx, stop := contextUntil(ctx, s.server.Exited(), s.server.Err)
	defer stop()
	found, err := measure(ctx, s)
	return found, explain(ctx, s.server, err)
}

// stop stops the server, even when ctx has ended. The end of ctx only shortens the time that the server gets.
func (s *session) stop(ctx context.Context) error {
	s.settle(Idling)
	ended, err := s.server.Stop(ctx)
	s.result.Ended = ended
	s.spend(Stopping, ended.Took-ended.GPUWait)
	s.spend(Releasing, ended.GPUWait)
	s.settle(Stopping)
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

// sendPass sends n uncounted requests of a stream, from number first on, and waits until the server is idle.
func (s *session) sendPass(ctx context.Context, stream workload.Stream, first, n int, rate float64) error {
	_, err := s.sendUncounted(ctx, WarmingUp, s.passOf(s.runner.Source, stream, first, n, rate), nil, beforeProbes)
	return err
}

func (s *session) passOf(source workload.Source, stream workload.Stream, first, n int, rate float64) workload.Schedule {
	return workload.Pass{Source: source, Seed: s.runner.Seed, Stream: stream, Rate: rate, First: first, N: n}.Schedule()
}

// sendUncounted sends a load that belongs to no probe, and waits until the server is idle. It books the time as the
// given part. Its messages call the requests by the given name.
func (s *session) sendUncounted(ctx context.Context, part Part, schedule workload.Schedule, stop bench.Stop, name string) (bench.Run, error) {
	run, err := s.sendTimed(ctx, part, schedule, stop)
	if err == nil {
		err = s.checkAnswers(ctx, run, name)
	}
	if err != nil {
		return run, err
	}
	return run, s.awaitIdle(ctx, part)
}

// sendTimed sends a load, and counts its GPU time.
func (s *session) sendTimed(ctx context.Context, part Part, schedule workload.Schedule, stop bench.Stop) (bench.Run, error) {
	began := time.Now()
	run, err := s.send(ctx, schedule, stop)
	if err != nil {
		run.Elapsed = time.Since(began) // a load that ends with an error costs time too
	}
	s.spend(part, run.Elapsed)
	return run, err
}

// awaitIdle waits until the server is idle, and counts the GPU time of the wait.
func (s *session) awaitIdle(ctx context.Context, part Part) error {
	took, err := drain(ctx, s.server)
	s.spend(part, took)
	return err
}

// checkAnswers adds a note if requests of an uncounted load failed. If most of them failed, or if no request was answered
// after the last failure, the server may be dying, so checkAnswers waits some time for the server's death.
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
		return uselessError(ctx, s.server, status, fmt.Sprintf("%s %s failed: %s", render.All(sent, "request"), which, detail))
	}
	if broken > 0 {
		s.note("%s %s failed: %s", render.Of(broken, sent, "request"), which, detail)
	}
	if 2*broken > sent || fellSilent(run.Samples) {
		return AwaitDeath(ctx, s.server, nil)
	}
	return nil
}

// checkAlive asks the server for two tokens after a load in which no request was completed. A probe may end early,
// before its requests show that the server hangs. The requests are then withdrawn, so they cannot show it later. One
// token is not enough, because some servers hang after the first token. If both tokens come, the server is only slow,
// and its probe counts. Otherwise the server is at fault, and no limit was broken.
func (s *session) checkAlive(ctx context.Context, run bench.Run) error {
	if !run.Silent() {
		return nil
	}
	s.task.progress("no request was completed; asking the server for two tokens")
	one := *s.runner.Source.Request(workload.WarmUpStream.Draw(2), 0) // no probe sends this request
	one.OutputTokens = min(2, one.OutputTokens)
	last, err := s.sendTimed(ctx, RunOut, atOnce([]workload.Request{one}), nil)
	if err != nil {
		return err
	}
	for _, sample := range last.Samples {
		switch {
		case sample.OK():
			return s.awaitIdle(ctx, RunOut)
		case sample.Failure != "" && sample.Failure != bench.TimedOut && sample.Failure != bench.NeverFinished:
			return uselessError(ctx, s.server, sample.Status, fmt.Sprintf("no request was completed, and a single request sent afterwards failed too: %s: %s", sample.Failure, sample.Detail))
		}
	}
	return AwaitDeath(ctx, s.server, &serverctl.ExitError{Class: serverctl.Hang, Cause: serverctl.NoToken, Code: -1,
		Evidence: fmt.Sprintf("no request was completed under load, and a single request afterwards was not completed within %.0f s", last.Elapsed.Seconds())})
}
