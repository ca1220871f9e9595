package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"vllmtuner/render"
)

// shmEvery is the pause between two recordings of the shared memory of a starting server. The server may die before it
// is ready.
const shmEvery = time.Second

// errStartTimeout is the cause of a start that took too long.
var errStartTimeout = errors.New("the start timeout has passed")

// A readiness waits until a started server is ready. It remembers what its checks have found so far.
type readiness struct {
	server    *Server
	waiting   string // the condition that was not met in the last check
	told      string // the last phase that was reported as progress
	healthy   bool   // /health answered 200
	strangers int    // checks in a row in which another process answered on the port
}

// await waits until the server has generated a token, at most for StartTimeout.
func (r *readiness) await(ctx context.Context) error {
	s := r.server
	ctx, cancel := context.WithTimeoutCause(ctx, s.config.StartTimeout, errStartTimeout)
	defer cancel()
	r.waiting = "the process to begin"
	shm := time.NewTicker(shmEvery)
	defer shm.Stop()
	for {
		select {
		case <-s.process.Exited():
			s.log.close() // Stop reports the error of this call
			return s.death(exitStateOf(s.process.State(), ""))
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, errStartTimeout) {
				return fmt.Errorf("start the server: %w", cause)
			}
			return r.timeout()
		case <-shm.C:
			_ = s.seeShm() // this call may fail, because processes come and go; Stop reports what it cannot see
			continue
		case <-time.After(s.config.limits.readyEvery):
		}
		now := s.log.snapshot()
		if phase := now.progress(); phase != "" && phase != r.told {
			s.config.progress("%s", phase)
			r.told = phase
		}
		var err error
		if r.waiting, err = r.check(ctx); r.waiting == "" || err != nil {
			return err
		}
	}
}

// timeout returns the failure of a server that is not ready after StartTimeout.
func (r *readiness) timeout() *ExitError {
	s := r.server
	now := s.log.snapshot()
	// If the weights were still loading, the disk is to blame, and not the point (the server's flags).
	if now.phase == loadingPhase && now.shards > 0 && now.shards < 100 {
		return s.log.failure(Infrastructure, SlowDisk, "%d %% of the weights were loaded after %s", now.shards, render.Took(s.config.StartTimeout))
	}
	e := s.log.failure(StartTimeout, "", "not ready after %s, still waiting for %s", render.Took(s.config.StartTimeout), r.waiting)
	if last := now.lastLine(); last != "" {
		e.Evidence += "; last line: " + last
	}
	return e
}

// check checks the conditions of a ready server, one after another. It returns the first condition that is not met, or
// "" when the server is ready. An error means that no wait can help.
func (r *readiness) check(ctx context.Context) (waiting string, err error) {
	s := r.server
	health, err := s.client.call(ctx, http.MethodGet, "/health", nil, s.config.limits.healthTimeout)
	if err != nil {
		r.strangers = 0
		return "/health (" + err.Error() + ")", nil
	}
	ours, err := s.process.Listens(s.port)
	if err != nil {
		return "", s.log.failure(Infrastructure, "", "%v", err)
	}
	if r.strangers++; !ours && r.strangers < 2 {
		return "the server's own process to answer on the port", nil // the server may have died between its answer and our check
	}
	if !ours {
		return "", s.log.failure(PortTaken, "", "port %d is answered by a process that the tuner did not start", s.port)
	}
	s.owned, r.strangers = true, 0
	if r.healthy && health.status == http.StatusServiceUnavailable { // the engine died during the first token
		return "", s.engineDeath()
	}
	r.healthy = health.status == http.StatusOK
	if !r.healthy {
		return fmt.Sprintf("/health (HTTP %d)", health.status), nil
	}
	model, waiting, err := s.client.model(ctx)
	if waiting != "" || err != nil {
		return waiting, err
	}
	s.modelID, s.facts.MaxModelLen = model.ID, model.MaxModelLen
	return s.client.firstToken(ctx, s.modelID)
}
