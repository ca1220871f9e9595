package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// lastWords is how long an engine that has just died has to get its reason through the pipe.
const lastWords = 500 * time.Millisecond

// beginWatch starts the watchers, which Stop ends and waits for.
func (s *Server) beginWatch(ctx context.Context) {
	// The server outlives the context of its start; its end is Stop's.
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

// watch returns how the server died or became useless, or nil when ctx ended first. An engine that is dead leaves its API
// server alive for seconds or, with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH, for ever: /health tells by 503 (0.14.1, 0.33.0). An
// engine that hangs does not show there, only in counters that stand still.
func (s *Server) watch(ctx context.Context) *ExitError {
	failures := 0
	still := stillness{limit: s.config.HangTimeout}
	next := time.Now()  // of the counters
	var ping chan error // one is under way; nil when none is
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-ping:
			if ping = nil; err != nil && ctx.Err() == nil {
				return s.hang(NoToken, fmt.Sprintf("an idle server made no token of a request within %v: %v", s.config.HangTimeout, err))
			}
			continue
		case <-s.process.Exited():
			s.log.close() // its error is reported by Stop
			// The exit code is 0 when the engine died under an API server that then shut down in good order.
			ending := "the server ended by itself: "
			if s.process.ExitCode() < 0 {
				ending = "the server's first process was ended: "
			}
			return s.death(s.process.ExitCode(), ending+s.process.Ending())
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
			if s.log.askedToEnd() { // and waits for its clients, as 0.14.1 does without a limit
				return s.death(-1, "")
			}
			return s.hang(Deaf, fmt.Sprintf("/health failed %d times in a row: %v", failures, err))
		}
		if now := time.Now(); failures == 0 && !now.Before(next) {
			next = now.Add(s.config.limits.sampleEvery)
			_ = s.seeShm() // of processes that come and go; Stop says what it cannot see
			if evidence := s.look(ctx, &still); evidence != "" {
				return s.hang(NoToken, evidence)
			}
			if ping == nil && still.tooQuiet(now) {
				ping = s.ping(ctx)
			}
		}
	}
}

// ping asks for one token. An engine that froze while it was idle does not tell its API server of the requests that came
// since, so that by its counters it is idle for ever (SIGSTOP of EngineCore, 0.14.1).
func (s *Server) ping(ctx context.Context) chan error {
	answered := make(chan error, 1)
	s.watched.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, s.config.HangTimeout)
		defer cancel()
		waiting, err := s.firstToken(ctx)
		switch {
		case ctx.Err() == nil: // an answer, if not a good one: an end is seen by the process and by /health
			err = nil
		case err == nil && waiting != "":
			err = errors.New("waited for " + waiting)
		}
		answered <- err
	})
	return answered
}

// engineDeath waits a moment for the engine's last words: the API server may answer before they came through the pipe.
func (s *Server) engineDeath() *ExitError {
	for deadline := time.Now().Add(lastWords); !s.log.told() && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
	}
	e := s.death(-1, "/health answers 503: the engine is dead")
	if e.Class == CrashLoad && e.Cause == "" {
		e.Cause = EngineDead
	}
	return e
}

// death explains the end of the server by its log, and by the kernel's word where a process was killed.
func (s *Server) death(code int, ending string) *ExitError {
	e := s.log.death(code, ending)
	if e.Class == ModelNotFound && !strings.Contains(e.Evidence, s.config.Model) {
		e.Evidence = fmt.Sprintf("model %s: %s", s.config.Model, e.Evidence)
	}
	if e.Cause != Killed {
		return e
	}
	if n, at, err := s.config.machine.OOMKills(); err == nil && at != "" && n > s.oomKills {
		e.Cause = HostOOM
		e.Evidence = fmt.Sprintf("the kernel ended %d of the processes here for lack of memory (%s); %s", n-s.oomKills, at, e.Evidence)
	}
	return e
}

// look reads the counters, keeps them where a series is wanted, and returns why the server hangs, if it does.
func (s *Server) look(ctx context.Context, still *stillness) (evidence string) {
	ctx, cancel := context.WithTimeout(ctx, s.config.limits.healthTimeout)
	defer cancel()
	c, err := s.Counters(ctx)
	if err != nil {
		return "" // /health judges whether the server answers
	}
	now := time.Now()
	s.series.add(now, c)
	return still.see(now, c)
}

func (s *Server) hang(cause Cause, evidence string) *ExitError {
	return &ExitError{Class: Hang, Cause: cause, Evidence: evidence, Code: -1, Tail: s.log.last()}
}

// A stillness is how long a server has had requests and made nothing of them.
type stillness struct {
	limit time.Duration
	last  Counters
	since time.Time // of the last progress, or of the last look at which there was nothing to do
	token time.Time // of the last progress, or ping
}

// tooQuiet reports whether there was no token for so long that an idle server must show that it can make one.
func (s *stillness) tooQuiet(now time.Time) bool {
	if now.Sub(s.token) < s.limit {
		return false
	}
	s.token = now
	return true
}

// see returns what shows a hang: for the limit no token was read or written though requests run or wait.
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
	return fmt.Sprintf("no token for %v though %g requests run and %g wait", s.limit, c.Running, c.Waiting)
}
