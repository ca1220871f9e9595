package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"time"

	"vllmtuner/render"
)

// lastWords is how long to wait for a dead engine's last log lines. They tell why it died, and may still be in the
// pipe.
const lastWords = 500 * time.Millisecond

// beginWatch starts the watchers. Stop ends them and waits for them.
func (s *Server) beginWatch(ctx context.Context) {
	// The watchers must go on after the start, whose context is ctx. Stop ends them.
	watchCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	s.stopWatch = cancel
	s.watched.Go(func() {
		if err := s.watch(watchCtx); err != nil {
			s.err = err
			close(s.exited)
		}
	})
	s.watched.Go(func() { s.watchGPUs(watchCtx) })
}

// watch returns how the server died or became useless, or nil when ctx ended first. After the death of its engine, an
// API server lives on for seconds, or for ever with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH. Its /health then answers 503
// (0.14.1, 0.33.0). A hanging engine shows only in counters that stand still.
func (s *Server) watch(ctx context.Context) *ExitError {
	failures := 0
	still := stillness{limit: s.config.HangTimeout}
	next := time.Now()  // when to read the counters next
	var ping chan error // the ping in progress; nil when there is none
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ping:
			if ping = nil; err != nil && ctx.Err() == nil {
				return s.failure(Hang, NoToken, "an idle server generated no token for a request of the tuner within %s: %v", render.Took(s.config.HangTimeout), err)
			}
			continue
		case <-s.process.Exited():
			s.log.close() // the error is left to Stop, which reports it
			// Exit code 0 is possible too: the engine died, and the API server then shut down normally.
			what := "the server ended by itself: "
			if s.process.State().ExitCode() < 0 {
				what = "the server's first process was ended: "
			}
			return s.death(s.exitState(what))
		case <-time.After(s.config.limits.healthEvery):
		}
		health, err := s.call(ctx, http.MethodGet, "/health", nil, s.config.limits.healthTimeout)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			failures++
		case health.status == http.StatusServiceUnavailable:
			return s.engineDeath()
		default:
			failures = 0
		}
		if failures >= s.config.limits.healthFailures {
			// Somebody has ended the server from outside, and it waits for its clients. 0.14.1 has no limit for this
			// wait.
			if s.log.now().signs.outside != nil {
				return s.death(exitState{code: -1})
			}
			return s.failure(Hang, Deaf, "/health failed %d times in a row: %v", failures, err)
		}
		if now := time.Now(); failures == 0 && !now.Before(next) {
			next = now.Add(s.config.limits.sampleEvery)
			_ = s.seeShm() // may fail, because processes come and go; Stop reports what it cannot see
			if evidence := s.readCounters(ctx, &still); evidence != "" {
				return s.failure(Hang, NoToken, "%s", evidence)
			}
			if ping == nil && still.tooQuiet(now) {
				ping = s.ping(ctx)
			}
		}
	}
}

// ping requests one token. If an engine froze while it was idle, it does not report the requests that came since. So
// its counters look idle for ever (SIGSTOP of EngineCore, 0.14.1).
func (s *Server) ping(ctx context.Context) chan error {
	answered := make(chan error, 1)
	s.watched.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, s.config.HangTimeout)
		defer cancel()
		waiting, err := s.firstToken(ctx)
		switch {
		case ctx.Err() == nil: // any answer in time proves life; the process and /health show an end
			err = nil
		case err == nil && waiting != "":
			err = errors.New("waited for " + waiting)
		}
		answered <- err
	})
	return answered
}

// engineDeath explains a dead engine. It first waits briefly for the engine's last log lines: the API server may answer
// before they have come through the pipe.
func (s *Server) engineDeath() *ExitError {
	for deadline := time.Now().Add(lastWords); s.log.now().signs.known == nil && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	e := s.death(exitState{code: -1, words: "/health answers 503: the engine is dead"})
	if e.Class == CrashLoad && e.Cause == "" {
		e.Cause = EngineDead
	}
	return e
}

// exitState returns how the server's first process ended. The words in what come before the description.
func (s *Server) exitState(what string) exitState {
	state := s.process.State()
	end := exitState{code: state.ExitCode(), words: what + state.String()}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		end.signal = status.Signal()
	}
	return end
}

// death explains the end of the server by its log. If a process was killed, it also reads the kernel's counter of
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

// readCounters reads the counters, and adds them to a series if one is wanted. If the server hangs, it returns the
// evidence.
func (s *Server) readCounters(ctx context.Context, still *stillness) (evidence string) {
	ctx, cancel := context.WithTimeout(ctx, s.config.limits.healthTimeout)
	defer cancel()
	c, err := s.Counters(ctx)
	if err != nil {
		return "" // /health shows whether the server answers
	}
	now := time.Now()
	s.series.add(now, c)
	return still.see(now, c)
}

// failure returns the failure of a server that still runs.
func (s *Server) failure(class Class, cause Cause, format string, args ...any) *ExitError {
	return &ExitError{Class: class, Cause: cause, Evidence: fmt.Sprintf(format, args...), Code: -1, Tail: s.log.now().tail}
}

// A stillness tracks how long a server has had requests without making progress.
type stillness struct {
	limit time.Duration
	last  Counters
	since time.Time // time of the last progress, or of the last reading without requests
	token time.Time // time of the last progress, or of the last ping
}

// tooQuiet reports whether no token came for the time limit. Then even an idle server must prove that it can generate
// one. The time starts again after each such report.
func (s *stillness) tooQuiet(now time.Time) bool {
	if now.Sub(s.token) < s.limit {
		return false
	}
	s.token = now
	return true
}

// see returns the evidence of a hang: requests are running or waiting, but for the whole time limit no token was read
// or written.
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
