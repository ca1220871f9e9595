package serverctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"strconv"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
)

const (
	portAttempts = 3 // attempts after the first; another process may take the port before the server binds it
	// shmEvery is how often the shared memory of a starting server is recorded, in case it dies before it is ready.
	shmEvery = time.Second
	// abortGrace is how long a server that was never ready may take to end. It is short, because such a server has
	// nothing to finish.
	abortGrace = 5 * time.Second
)

// errStartTimeout is the cause of a start that took too long.
var errStartTimeout = errors.New("the start timeout has passed")

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
		// A server that does not share its address while it binds cannot get a port that we hold. So later attempts
		// release it.
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
		log:    &logbook{to: c.Log, secrets: c.secrets(environ)},
		http:   &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 2}}, // ignores proxies of the environment
		port:   port,
		url:    "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		exited: make(chan struct{}),
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
		err = s.awaitReady(ctx)
	}
	if err != nil {
		return nil, s.abort(ctx, err)
	}
	s.finishStart(ctx, begin)
	return s, nil
}

// abort ends a server that never became ready, and returns cause. If the server cannot be ended, abort returns the
// error of that, because no other server may be started beside it.
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
	parts := s.log.ready(now)
	facts := s.log.now().facts
	facts.MaxModelLen = s.facts.MaxModelLen
	facts.StartUp, facts.Parts, facts.Port = now.Sub(begin), parts, s.port
	s.facts = facts
	if s.facts.Version == "" {
		s.facts.Version = s.version(ctx)
	}
	s.facts.Args = s.resolvedArgs(ctx)
	s.config.progress("ready after %s", render.Took(s.facts.StartUp))
	s.beginWatch(ctx)
}

// awaitReady waits until the server has generated a token, at most for StartTimeout.
func (s *Server) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, s.config.StartTimeout, errStartTimeout)
	defer cancel()
	waiting := "the process to begin"
	told := ""
	shm := time.NewTicker(shmEvery)
	defer shm.Stop()
	for {
		select {
		case <-s.process.Exited():
			s.log.close() // the error is left to Stop, which reports it
			return s.death(s.exitState(""))
		case <-ctx.Done():
			if cause := context.Cause(ctx); !errors.Is(cause, errStartTimeout) {
				return fmt.Errorf("start the server: %w", cause)
			}
			return s.startTimeout(waiting)
		case <-shm.C:
			_ = s.seeShm() // may fail, because processes come and go; Stop reports what it cannot see
			continue
		case <-time.After(s.config.limits.readyEvery):
		}
		now := s.log.now()
		if phase := now.progress(); phase != "" && phase != told {
			s.config.progress("%s", phase)
			told = phase
		}
		var err error
		if waiting, err = s.checkReady(ctx); waiting == "" || err != nil {
			return err
		}
	}
}

func (s *Server) startTimeout(waiting string) *ExitError {
	now := s.log.now()
	// If the weights were still loading, the disk is to blame, not the point.
	if now.phase == loadingPhase && now.shards > 0 && now.shards < 100 {
		return s.failure(Infrastructure, SlowDisk, "%d %% of the weights were loaded after %s", now.shards, render.Took(s.config.StartTimeout))
	}
	e := s.failure(StartTimeout, "", "not ready after %s, still waiting for %s", render.Took(s.config.StartTimeout), waiting)
	if last := now.lastLine(); last != "" {
		e.Evidence += "; last line: " + last
	}
	return e
}

// checkReady checks the conditions of a ready server, one after another. waiting says which condition is missing; empty
// means that the server is ready. err is an error that waiting does not cure.
func (s *Server) checkReady(ctx context.Context) (waiting string, err error) {
	health, err := s.call(ctx, http.MethodGet, "/health", nil, s.config.limits.healthTimeout)
	if err != nil {
		s.strangers = 0
		return "/health (" + err.Error() + ")", nil
	}
	ours, err := s.process.Listens(s.port)
	if err != nil {
		return "", s.failure(Infrastructure, "", "%v", err)
	}
	if s.strangers++; !ours && s.strangers < 2 {
		return "the server's own process to answer on the port", nil // it may have died between its answer and our check
	}
	if !ours {
		return "", s.failure(PortTaken, "", "port %d is answered by a process that the tuner did not start", s.port)
	}
	s.owned, s.strangers = true, 0
	if s.healthy && health.status == http.StatusServiceUnavailable { // the engine died during the first token
		return "", s.engineDeath()
	}
	s.healthy = health.status == http.StatusOK
	if !s.healthy {
		return fmt.Sprintf("/health (HTTP %d)", health.status), nil
	}
	if waiting, err := s.readModel(ctx); waiting != "" || err != nil {
		return waiting, err
	}
	return s.firstToken(ctx)
}

// readModel reads the model's id and length from /v1/models.
func (s *Server) readModel(ctx context.Context) (waiting string, err error) {
	var models struct {
		Data []struct {
			ID          string `json:"id"`
			MaxModelLen int    `json:"max_model_len"`
		} `json:"data"`
	}
	waiting, err = s.ask(ctx, http.MethodGet, "/v1/models", nil, &models)
	if waiting != "" || err != nil {
		return waiting, err
	}
	if len(models.Data) == 0 {
		return "a model in /v1/models", nil
	}
	s.modelID, s.facts.MaxModelLen = models.Data[0].ID, models.Data[0].MaxModelLen
	return "", nil
}

// firstToken asks the server for one token, because /health does not run the model.
func (s *Server) firstToken(ctx context.Context) (waiting string, err error) {
	var completion struct {
		Choices []struct{} `json:"choices"`
	}
	body := map[string]any{"model": s.modelID, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
	waiting, err = s.ask(ctx, http.MethodPost, "/v1/completions", body, &completion)
	if waiting == "" && err == nil && len(completion.Choices) == 0 {
		return "a first token", nil
	}
	return waiting, err
}

// version asks the server for its version. It returns "" if the server cannot tell.
func (s *Server) version(ctx context.Context) string {
	var v struct{ Version string }
	if waiting, err := s.ask(ctx, http.MethodGet, "/version", nil, &v); waiting != "" || err != nil {
		return ""
	}
	return v.Version
}
