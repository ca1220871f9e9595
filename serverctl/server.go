package serverctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"vllmtuner/serverctl/proc"
)

// portCloseLimit is how long a port may stay open after the last process has gone. The kernel closes it at once.
const portCloseLimit = 5 * time.Second

// A Server is one running inference server, ready since Start returned it.
type Server struct {
	config    Config
	process   *proc.Process
	log       *logbook
	http      *http.Client
	port      int
	url       string
	owned     bool // the port was seen to be ours
	strangers int  // looks in a row at which somebody else answered on the port
	modelID   string
	facts     Facts

	stopWatch context.CancelFunc // ends the watcher
	watched   sync.WaitGroup     // the watcher
	exited    chan struct{}      // closed by the watcher, after err was set
	err       error

	stopOnce sync.Once
	stopTook time.Duration
	stopErr  error
}

// URL is the base URL, such as http://127.0.0.1:8000.
func (s *Server) URL() string { return s.url }

// ModelID is the name under which requests address the model.
func (s *Server) ModelID() string { return s.modelID }

// Facts are what the server said of itself during its start.
func (s *Server) Facts() Facts { return s.facts }

// Exited is closed when the server has died or become useless by itself; not by Stop.
func (s *Server) Exited() <-chan struct{} { return s.exited }

// Err returns why Exited is closed, an *ExitError, and nil while it is not.
func (s *Server) Err() error {
	select {
	case <-s.exited:
		return s.err
	default:
		return nil
	}
}

// beginWatch starts the watcher, which Stop ends and waits for.
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
}

// watch returns how the server died or became useless, or nil when ctx ended first. An engine that is dead leaves its API
// server alive for seconds or, with VLLM_KEEP_ALIVE_ON_ENGINE_DEATH, for ever: /health tells by 503 (0.14.1, 0.33.0).
func (s *Server) watch(ctx context.Context) error {
	failures := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.process.Exited():
			s.log.close() // its error is reported by Stop
			// The exit code is 0 when the engine died under an API server that then shut down in good order.
			return s.log.death(s.process.ExitCode(), "the server ended by itself: "+s.process.Ending())
		case <-time.After(s.config.limits.healthEvery):
		}
		health, err := s.call(ctx, http.MethodGet, "/health", nil, s.config.limits.healthTimeout)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			failures++
		case health.status == http.StatusServiceUnavailable:
			return s.log.death(-1, "/health answers 503: the engine is dead")
		default:
			failures = 0
		}
		if failures >= s.config.limits.healthFailures {
			return s.hang(fmt.Sprintf("/health failed %d times in a row: %v", failures, err))
		}
	}
}

func (s *Server) hang(evidence string) *ExitError {
	return &ExitError{Class: Hang, Evidence: evidence, Code: -1, Tail: s.log.last()}
}

// Stop ends the server: SIGTERM, StopTimeout for it to end, SIGKILL to everything that came of it; it returns when no
// process lives and the port is closed, and how long that took. Callers close their streams first: a server that waits
// for its clients uses up the StopTimeout. The end of ctx cuts the StopTimeout short. A second call returns the same.
func (s *Server) Stop(ctx context.Context) (time.Duration, error) {
	s.stopOnce.Do(func() {
		begin := time.Now()
		if s.stopWatch != nil {
			s.stopWatch()
			s.watched.Wait()
		}
		s.http.CloseIdleConnections()
		err := s.process.Stop(ctx, s.config.StopTimeout)
		if logErr := s.log.close(); logErr != nil {
			s.config.progress("the server's log is incomplete: %v", logErr)
		}
		if err == nil && s.owned {
			err = awaitClosed(s.port)
		}
		if err != nil {
			s.stopErr = fmt.Errorf("stop the server on port %d: %w", s.port, err)
		}
		s.stopTook = time.Since(begin)
	})
	return s.stopTook, s.stopErr
}

// awaitClosed waits until nobody listens on a port.
func awaitClosed(port int) error {
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	for deadline := time.Now().Add(portCloseLimit); ; time.Sleep(50 * time.Millisecond) {
		conn, err := net.DialTimeout("tcp", address, time.Second)
		if err != nil {
			return nil
		}
		if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			return fmt.Errorf("look whether port %d is closed: %w", port, err)
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("wait for port %d to close: still open after %v", port, portCloseLimit)
		}
	}
}
