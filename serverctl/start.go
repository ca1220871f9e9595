package serverctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
)

const (
	portAttempts = 3 // how many attempts follow the first; another process may take the port before the server binds it
	// abortGrace is how long a server that was never ready may take to end. It is short, because such a server has
	// nothing to finish.
	abortGrace = 5 * time.Second
)

// Start starts a server and returns it when it has generated a first token. The server is our own child, and Start
// checks that the socket on the port belongs to it. So Start never mistakes another process for the server.
//
// A server that dies, hangs or rejects its flags gives an *ExitError. A config with which no server can start, such as
// a missing program, gives another error, because no other flags would help. The end of ctx stops the server. When
// Start returns an error, no process is left.
func Start(ctx context.Context, config Config) (*Server, error) {
	c, err := config.withDefaults()
	if err != nil {
		return nil, err
	}
	wanted := c.Port
	for attempt := 0; ; attempt++ {
		held, err := holdPort(wanted)
		if err != nil {
			return nil, err
		}
		if wanted != 0 && held.port != wanted {
			c.progress("port %d is taken by another process; the server gets port %d", wanted, held.port)
		}
		// A server that binds without SO_REUSEADDR cannot get a port that we hold. So each attempt after the first
		// releases the port before the start.
		if attempt > 0 {
			held.release()
		}
		server, err := launch(ctx, c, held.port)
		held.release()
		exit, ok := errors.AsType[*ExitError](err)
		if !ok || exit.Class != PortTaken || attempt == portAttempts {
			return server, err
		}
		c.progress("port %d was taken while the server started; trying another port", held.port)
		wanted = 0
	}
}

// launch starts the process on a port and waits until it is ready.
func launch(ctx context.Context, c Config, port int) (*Server, error) {
	environ := c.environ()
	program, err := c.program(environ)
	if err != nil {
		return nil, err
	}
	s := &Server{
		config: c,
		log:    &logbook{fullLog: c.Log, censor: c.censor(environ)},
		port:   port,
		gpus:   newGPUs(c),
		exited: make(chan struct{}),
	}
	s.client = &client{
		http: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2}}, // ignores the proxies that the environment names
		url:  "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		key:  c.APIKey,
		log:  s.log,
	}
	if err := s.takeStock(ctx); err != nil {
		return nil, err
	}
	c.progress("starting the server on port %d", port)
	begin := time.Now()
	s.log.begin(begin)
	s.process, err = proc.Start(proc.Spec{Argv: c.argv(program, port), Env: environ, Output: s.log})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w; the file exists, so the interpreter in its first line is missing", err)
	}
	if err != nil {
		return nil, err
	}
	if c.OnRecord != nil {
		err = c.OnRecord(s.process.Record())
	}
	if err == nil {
		err = (&readiness{server: s}).await(ctx)
	}
	if err != nil {
		return nil, s.abort(ctx, err)
	}
	s.finishStart(ctx, begin)
	return s, nil
}

// abort ends a server that never became ready, and returns cause. If the server cannot be ended, abort returns the
// reason instead, because no other server may be started beside it.
func (s *Server) abort(ctx context.Context, cause error) error {
	s.config.StopTimeout = min(s.config.StopTimeout, abortGrace)
	if _, err := s.Stop(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("%w; the reason to stop it was: %v", err, cause)
	}
	return cause
}

// finishStart completes the facts of a ready server, and begins to watch it.
func (s *Server) finishStart(ctx context.Context, begin time.Time) {
	now := time.Now()
	parts := s.log.endStart(now)
	facts := s.log.snapshot().facts
	facts.MaxModelLen = s.facts.MaxModelLen
	facts.StartUp, facts.Parts, facts.Port = now.Sub(begin), parts, s.port
	// Only the variables from the configuration are kept. The image of the container may set other unknown variables.
	facts.UnknownVariables = slices.DeleteFunc(facts.UnknownVariables, func(name string) bool {
		_, given := s.config.Env[name]
		return !given
	})
	s.facts = facts
	if s.facts.Version == "" {
		s.facts.Version = s.client.version(ctx)
	}
	s.facts.Args = s.client.resolvedArgs(ctx, s.log.snapshot().args)
	s.config.progress("ready after %s", render.Took(s.facts.StartUp))
	s.beginWatch(ctx)
}
