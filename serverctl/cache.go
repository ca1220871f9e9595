package serverctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"vllmtuner/render"
)

const (
	drainEvery = 100 * time.Millisecond
	// resetAttempts is more than one because a reset fails until all blocks are free (vllm/v1/core/block_pool.py). The
	// server frees the last blocks a moment after it sent the last answer.
	resetAttempts = 10
	// resetLogWait is how long to wait for the log line about a reset. In vLLM 0.14.1 only this line says whether the
	// reset succeeded.
	resetLogWait = time.Second
)

// Drain waits until no request runs or waits, and returns how long that took. It waits at most two minutes. After that
// the server counts as hanging, and Drain returns an *ExitError.
func (s *Server) Drain(ctx context.Context) (time.Duration, error) {
	begin := time.Now()
	for {
		counters, err := s.Counters(ctx)
		took := time.Since(begin)
		if err == nil && counters.Running == 0 && counters.Waiting == 0 {
			return took, nil
		}
		if took > s.config.limits.drain {
			state := fmt.Sprintf("%g running and %g waiting", counters.Running, counters.Waiting)
			if err != nil {
				state = err.Error()
			}
			return took, s.log.failure(Hang, NotDrained, "waited for all requests to end: still %s after %s without load", state, render.Took(s.config.limits.drain))
		}
		if err := s.pause(ctx, drainEvery); err != nil {
			return time.Since(begin), fmt.Errorf("wait for all requests to end: %w", err)
		}
	}
}

// pause waits for the duration d, unless the server dies or ctx ends.
func (s *Server) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-s.exited:
		return s.err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// ErrNoReset is returned for a server that cannot empty its prefix cache.
var ErrNoReset = errors.New("reset the prefix cache: the server has no /reset_prefix_cache, although the tuner sets VLLM_SERVER_DEV_MODE=1 to enable it; " +
	"check whether server.env sets another value, or use the cache protocol steady or primed")

// errNotFreed says that a reset failed because blocks of the cache were in use.
var errNotFreed = errors.New("blocks of the prefix cache are still in use")

// ResetCache empties the prefix cache and checks that it is empty. It drains the server first.
func (s *Server) ResetCache(ctx context.Context) error {
	if _, err := s.Drain(ctx); err != nil {
		return err
	}
	var err error
	for range resetAttempts {
		err = s.resetOnce(ctx)
		if !errors.Is(err, errNotFreed) {
			break
		}
		if err := s.pause(ctx, s.config.limits.resetPause); err != nil {
			return fmt.Errorf("reset the prefix cache: %w", err)
		}
	}
	if errors.Is(err, errNotFreed) {
		return s.log.failure(Infrastructure, "", "reset the prefix cache of an idle server: %v after %d attempts", err, resetAttempts)
	}
	return err
}

// resetOnce requests a reset and finds out whether it happened.
func (s *Server) resetOnce(ctx context.Context) error {
	before := s.log.snapshot()
	a, err := s.client.call(ctx, http.MethodPost, "/reset_prefix_cache", nil, callTimeout)
	if err != nil {
		return fmt.Errorf("reset the prefix cache: %w", err)
	}
	if a.status == http.StatusNotFound {
		return ErrNoReset
	}
	if err := a.checkStatus("reset the prefix cache"); err != nil {
		return err
	}
	var said struct {
		Success *bool `json:"success"`
	}
	if json.Unmarshal(a.body, &said) == nil && said.Success != nil { // 0.33
		if *said.Success {
			return nil
		}
		return errNotFreed
	}
	// vLLM 0.14.1 answers with status 200 and no body, whether the reset succeeded or not. Only the engine's log tells
	// the result.
	for end := time.Now().Add(resetLogWait); time.Now().Before(end); {
		switch now := s.log.snapshot(); {
		case now.resetsLost > before.resetsLost:
			return errNotFreed
		case now.resetsDone > before.resetsDone:
			return nil
		}
		if err := s.pause(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("reset the prefix cache: %w", err)
		}
	}
	return s.resetUnseen(ctx)
}

// resetUnseen decides whether a reset succeeded when the log does not say so, for example with
// VLLM_LOGGING_LEVEL=WARNING. A reset fails only while blocks are in use, so resetUnseen checks whether any are in use.
func (s *Server) resetUnseen(ctx context.Context) error {
	counters, err := s.Counters(ctx)
	if err != nil {
		return fmt.Errorf("check the reset of the prefix cache: %w", err)
	}
	if counters.KVUsage > 0 {
		return errNotFreed
	}
	return nil
}
