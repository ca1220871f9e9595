package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"vllmtuner/render"
)

// The last log lines of a dead engine tell why it died. They may still be in the pipe when /health answers 503, so the
// tuner looks for them up to lastLooks times. It counts its looks and sets no deadline, so that the reader of the log
// gets its turns on a busy machine too: beside two busy loops, half a second was once too short. On an idle machine all
// the looks take 0.8 s.
const (
	lastLooks = 40
	lookPause = 20 * time.Millisecond
)

// beginWatch starts the watchers. Stop ends them and waits for them.
func (s *Server) beginWatch(ctx context.Context) {
	// The watchers must go on after the start, whose context is ctx. Stop ends them.
	watchCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.stopWatch = cancel
	s.watched.Go(func() {
		w := &watcher{server: s, still: stillness{limit: s.config.HangTimeout, quietLimit: s.config.limits.quiet}, next: time.Now()}
		if err := w.watch(watchCtx); err != nil {
			s.err = err
			close(s.exited)
		}
	})
	s.watched.Go(func() { s.gpus.watch(watchCtx, s.config.limits.sampleEvery, s.series.addGPUs) })
}

// A watcher notices that a ready server has died or become useless.
type watcher struct {
	server   *Server
	failures int // failed checks of /health in a row
	still    stillness
	next     time.Time  // when to read the counters next
	pinged   chan error // gets the result of the ping in progress; nil when no ping is in progress
}

// watch returns how the server died or became useless, or nil when ctx ended first. After the death of its engine, an
// API server lives on for seconds, or for ever with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH. Its /health then answers 503
// (0.14.1, 0.33.0). An engine that hangs is noticed only because its counters no longer change.
func (w *watcher) watch(ctx context.Context) *ExitError {
	s := w.server
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-w.pinged:
			if w.pinged = nil; err != nil && ctx.Err() == nil {
				return s.log.failure(Hang, NoToken, "an idle server generated no token for a request of the tuner within %s: %v", render.Took(s.config.HangTimeout), err)
			}
			continue
		case <-s.process.Exited():
			s.log.close() // Stop reports the error of this call
			// Exit code 0 is possible too: the engine died, and the API server then shut down normally.
			what := "the server ended by itself: "
			if s.process.State().ExitCode() < 0 {
				what = "the server's first process was ended: "
			}
			return s.death(exitStateOf(s.process.State(), what))
		case <-time.After(s.config.limits.healthEvery):
		}
		if e := w.checkHealth(ctx); e != nil || ctx.Err() != nil {
			return e
		}
		if now := time.Now(); w.failures == 0 && !now.Before(w.next) {
			w.next = now.Add(s.config.limits.sampleEvery)
			if e := w.checkProgress(ctx, now); e != nil {
				return e
			}
		}
	}
}

// checkHealth asks /health once. It returns a failure if the engine is dead, or if too many checks in a row got no
// answer.
func (w *watcher) checkHealth(ctx context.Context) *ExitError {
	s := w.server
	health, err := s.client.call(ctx, http.MethodGet, "/health", nil, s.config.limits.healthTimeout)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		w.failures++
	case health.status == http.StatusServiceUnavailable:
		return s.engineDeath()
	default:
		w.failures = 0
	}
	if w.failures < s.config.limits.healthFailures {
		return nil
	}
	// Somebody has ended the server from outside, and it waits for its clients. 0.14.1 has no limit for this wait.
	if s.log.snapshot().signs.outside != nil {
		return s.death(exitState{code: -1})
	}
	return s.log.failure(Hang, Deaf, "/health failed %d times in a row: %v", w.failures, err)
}

// checkProgress reads the counters once, and returns the failure of a server that hangs. It pings a server that
// generated no token for a while.
func (w *watcher) checkProgress(ctx context.Context, now time.Time) *ExitError {
	_ = w.server.seeShm() // this call may fail, because processes come and go; Stop reports what it cannot see
	if evidence := w.readCounters(ctx); evidence != "" {
		return w.server.log.failure(Hang, NoToken, "%s", evidence)
	}
	if w.pinged == nil && w.still.tooQuiet(now) {
		w.ping(ctx)
	}
	return nil
}

// ping requests one token. If an engine froze while it was idle, it does not count the requests that have come since
// then. So its counters look idle for ever (SIGSTOP of EngineCore, 0.14.1).
func (w *watcher) ping(ctx context.Context) {
	s, pinged := w.server, make(chan error, 1)
	w.pinged = pinged
	s.watched.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, s.config.HangTimeout)
		defer cancel()
		waiting, err := s.client.firstToken(ctx, s.modelID)
		switch {
		case ctx.Err() == nil: // any answer in time proves that the engine lives; the other checks notice its death
			err = nil
		case err == nil && waiting != "":
			err = errors.New("waited for " + waiting)
		}
		pinged <- err
	})
}

// readCounters reads the counters, and adds them to a series if one is wanted. If the server hangs, it returns the
// evidence.
func (w *watcher) readCounters(ctx context.Context) (evidence string) {
	ctx, cancel := context.WithTimeout(ctx, w.server.config.limits.healthTimeout)
	defer cancel()
	c, err := w.server.Counters(ctx)
	if err != nil {
		return "" // /health shows whether the server answers
	}
	now := time.Now()
	w.server.series.add(now, c)
	return w.still.see(now, c)
}

// engineDeath explains a dead engine. It first waits briefly for the engine's last log lines: the API server may answer
// before they have come through the pipe.
func (s *Server) engineDeath() *ExitError {
	for looks := 0; s.log.snapshot().signs.known == nil && looks < lastLooks; looks++ {
		time.Sleep(lookPause)
	}
	e := s.death(exitState{code: -1, words: "/health answers 503: the engine is dead"})
	if e.Class == CrashLoad && e.Cause == "" {
		e.Cause = EngineDead
	}
	return e
}

// exitStateOf describes how a server's first process ended, in words that begin with the prefix.
func exitStateOf(state *os.ProcessState, prefix string) exitState {
	end := exitState{code: state.ExitCode(), words: prefix + state.String()}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		end.signal = status.Signal()
	}
	return end
}

// death explains the end of the server from its log. If a process was killed, it also reads the kernel's counter of
// out-of-memory kills.
func (s *Server) death(end exitState) *ExitError {
	e := s.log.death(end)
	if e.Class == ModelNotFound && !strings.Contains(e.Evidence, s.config.Model) {
		e.Evidence = fmt.Sprintf("model %s: %s", s.config.Model, e.Evidence)
	}
	if e.Cause != Killed {
		return e
	}
	if n, at, err := s.config.machine.OOMKills(); err == nil && at != "" && n > s.oomKills {
		e.Cause = HostOOM
		e.Evidence = fmt.Sprintf("the kernel killed %d of the processes in this cgroup for lack of memory (%s); %s", n-s.oomKills, at, e.Evidence)
	}
	return e
}

// A stillness tracks how long a server has had requests without making progress.
type stillness struct {
	limit      time.Duration // how long requests may run or wait without progress
	quietLimit time.Duration // time without a token after which an idle server is pinged
	last       Counters
	since      time.Time // time of the last progress, or of the last reading without requests
	token      time.Time // time of the last progress, or of the last ping
}

// tooQuiet reports whether no token has come for quietLimit. If so, even an idle server must prove that it can generate
// a token. After tooQuiet has reported true, it measures the time from now on.
func (s *stillness) tooQuiet(now time.Time) bool {
	if now.Sub(s.token) < s.quietLimit {
		return false
	}
	s.token = now
	return true
}

// see takes note of a reading of the counters. It returns the evidence of a hang if requests ran or waited for the
// whole time limit while no token was read or written.
func (s *stillness) see(now time.Time, c Counters) (evidence string) {
	busy := c.Running+c.Waiting > 0
	moved := c.PromptTokens != s.last.PromptTokens || c.GenerationTokens != s.last.GenerationTokens
	s.last = c
	if moved || s.since.IsZero() {
		s.token = now
	}
	if !busy || moved || s.since.IsZero() {
		s.since = now
		return ""
	}
	if now.Sub(s.since) < s.limit {
		return ""
	}
	return fmt.Sprintf("no token for %s though %g requests run and %g wait", render.Took(s.limit), c.Running, c.Waiting)
}
