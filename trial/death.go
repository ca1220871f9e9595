package trial

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"vllmtuner/bench"
	"vllmtuner/serverctl"
)

// A serverError means that the server did not answer when the tuner asked it something, such as its counters. It is
// usually the first sign of the server's death.
type serverError struct{ error }

func (e serverError) Unwrap() error { return e.error }

func readCounters(ctx context.Context, server Server) (serverctl.Counters, error) {
	c, err := server.Counters(ctx)
	if err != nil {
		return c, serverError{fmt.Errorf("read the server's counters: %w", err)}
	}
	return c, nil
}

func drain(ctx context.Context, server Server) (time.Duration, error) {
	took, err := server.Drain(ctx)
	if err != nil {
		return took, serverError{err}
	}
	return took, nil
}

// turnedAway has the HTTP statuses with which a server, or a gateway in front of it, refuses every request. No engine
// flag causes them.
var turnedAway = []int{
	http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed,
	http.StatusRequestEntityTooLarge, http.StatusTooManyRequests, http.StatusServiceUnavailable,
}

// uselessError returns the error for a server that runs but fails every request. The given status is the HTTP status of
// the first failure; 0 if that failure has none. If the server dies within deathNotice, uselessError returns the
// server's own error.
func uselessError(ctx context.Context, server Server, status int, evidence string) error {
	class := serverctl.CrashLoad
	if slices.Contains(turnedAway, status) {
		class = serverctl.Infrastructure
	}
	return AwaitDeath(ctx, server, &serverctl.ExitError{Class: class, Evidence: evidence, Code: -1})
}

// explain returns err. If the server died, explain returns the server's own exit error instead, because err is then
// only a consequence.
func explain(ctx context.Context, server Server, err error) error {
	if err == nil {
		return nil
	}
	for _, e := range []error{err, context.Cause(ctx)} {
		if exit, ok := errors.AsType[*serverctl.ExitError](e); ok {
			return exit
		}
	}
	if _, ok := errors.AsType[serverError](err); ok && ctx.Err() == nil {
		return AwaitDeath(ctx, server, &serverctl.ExitError{Class: serverctl.Infrastructure, Evidence: err.Error(), Code: -1})
	}
	return err
}

// fellSilent reports whether a request failed as if the engine had died, and no answer came after the last such failure.
// Until the API server of a dead engine ends, it still answers that no request is running.
func fellSilent(samples []bench.Sample) bool {
	died := time.Duration(-1)
	for _, s := range samples {
		if lost(s) {
			died = max(died, s.End)
		}
	}
	return died >= 0 && !slices.ContainsFunc(samples, func(s bench.Sample) bool { return s.OK() && s.End > died })
}

// lost reports whether a request failed in a way in which requests fail when the engine dies.
func lost(s bench.Sample) bool {
	switch s.Failure {
	case bench.Refused, bench.Reset, bench.StreamError, bench.Truncated:
		return true
	case bench.Status:
		return s.Status >= http.StatusInternalServerError && !slices.Contains(turnedAway, s.Status)
	}
	return false
}

// deathNotice is how long AwaitDeath waits for a server to die, so that its own last words are the evidence. vLLM's API
// server checks every five seconds whether its engine has died (watchdog_loop in vllm/entrypoints/launcher.py, 0.14.1).
// On a machine without CPU time to spare, it then took more than another five seconds to end.
const deathNotice = 20 * time.Second

// AwaitDeath waits for the death of a server that seems to be dying, and returns the server's own error. If the server
// does not die within deathNotice, AwaitDeath returns the fallback, which may be nil.
func AwaitDeath(ctx context.Context, server Server, fallback *serverctl.ExitError) error {
	select {
	case <-server.Exited():
		return server.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(deathNotice):
	}
	if fallback == nil {
		return nil
	}
	return fallback
}
