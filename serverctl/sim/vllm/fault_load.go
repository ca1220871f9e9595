package vllm

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"vllmtuner/serverctl/sim"
)

const (
	// watchdogTime is how long an API server outlives its engine. vLLM checks every five seconds (watchdog_loop in
	// vllm/entrypoints/launcher.py, 0.14.1); with the shutdown, 0.32.0 took 3.1 to 7.4 s.
	watchdogTime = 5 * time.Second
	// runningPoll is how often the running requests are counted for running=.
	runningPoll = 5 * time.Millisecond
)

// A gate is the handler in front of the API. It applies the faults under load to the server, its clients and single requests, and it
// tells clients that the engine is dead. Without faults and with a living engine it changes nothing.
type gate struct {
	api    *api
	server *Server
	core   *core
	live   *live
	log    *logger
	began  time.Time // of the process

	ended   chan struct{} // closed when the server shall end by itself
	stopped chan struct{} // closed when the server ends, and the faults with it
	actions sync.WaitGroup
	silence atomic.Pointer[chan struct{}] // while it is set and open, the server answers nothing

	mu       sync.Mutex
	armed    []*armed
	requests int // completion requests so far
	inFlight map[int]context.CancelFunc
	dead     bool // the engine is
	over     bool // ended is closed
	closed   bool // stopped is closed
	abrupt   bool // the server ends without closing its streams properly
}

// An armed fault is a fault under load and its state.
type armed struct {
	Fault
	acted  bool
	chance *rand.Rand // of p=
}

func newGate(s *Server, c *core, l *live, log *logger, began time.Time) *gate {
	g := &gate{
		api: newAPI(l, log), server: s, core: c, live: l, log: log, began: began,
		ended: make(chan struct{}), stopped: make(chan struct{}), inFlight: make(map[int]context.CancelFunc),
	}
	for _, f := range s.Faults {
		if f.Trigger != "" {
			g.armed = append(g.armed, &armed{Fault: f, chance: rand.New(rand.NewPCG(f.Seed, 0))})
		}
	}
	return g
}

// face is that of the server.
func (g *gate) release() *release { return g.log.release }

// open starts to watch the engine and the triggers at= and running=.
func (g *gate) open() {
	g.actions.Go(g.watchEngine)
	for _, a := range g.armed {
		switch {
		case a.kind.act == nil: // a fault of single requests
		case a.Trigger == "at":
			g.actions.Go(func() {
				if g.pause(max(time.Nanosecond, time.Until(g.began.Add(a.At)))) {
					g.act(a)
				}
			})
		case a.Trigger == "running":
			g.actions.Go(func() { g.awaitRunning(a) })
		}
	}
}

// close ends the faults and returns when none runs any more. It may be called again.
func (g *gate) close() {
	g.mu.Lock()
	if !g.closed {
		g.closed = true
		close(g.stopped)
	}
	g.mu.Unlock()
	g.actions.Wait()
}

// pause waits for d, or for ever when d is 0. It returns false when the server ends first.
func (g *gate) pause(d time.Duration) bool {
	var over <-chan time.Time
	if d > 0 {
		over = time.After(d)
	}
	select {
	case <-over:
		return true
	case <-g.stopped:
		return false
	}
}

func (g *gate) awaitRunning(a *armed) {
	for g.running() < a.Running {
		if !g.pause(runningPoll) {
			return
		}
	}
	g.act(a)
}

func (g *gate) running() (n int) {
	g.live.with(func(e *sim.Engine) { n = e.Running() })
	return n
}

// act applies a fault to the whole server, once.
func (g *gate) act(a *armed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.actLocked(a)
}

// actLocked is act for callers that hold the mutex.
func (g *gate) actLocked(a *armed) {
	if a.acted || g.closed {
		return
	}
	a.acted = true
	g.actions.Go(func() { a.kind.act(g, a.Fault) })
}

// end ends the server. With abrupt it cuts the streams off.
func (g *gate) end(abrupt bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.over {
		g.over, g.abrupt = true, abrupt
		close(g.ended)
	}
}

// ServeHTTP handles every request.
func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !g.waitWhileDeaf(r.Context().Done()) {
		return
	}
	switch r.URL.Path {
	case "/health", "/ping":
		if g.isDead() { // vllm/entrypoints/serve/instrumentator/health.py
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
	case "/v1/completions", "/v1/chat/completions":
		g.completion(w, r)
		return
	}
	g.api.ServeHTTP(w, r)
}

// waitWhileDeaf returns when the server is not deaf, or false when the request ends first.
func (g *gate) waitWhileDeaf(gone <-chan struct{}) bool {
	silence := g.silence.Load()
	if silence == nil {
		return true
	}
	select {
	case <-*silence:
		return true
	case <-gone:
		return false
	}
}

func (g *gate) isDead() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.dead
}

// completion passes a request to the API, with the fault that it triggers for itself.
func (g *gate) completion(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	id, fault, dead := g.enter(cancel)
	defer g.leave(id)
	chat := strings.HasPrefix(r.URL.Path, "/v1/chat")
	switch {
	case dead:
		g.release().refuseDead(w, chat)
		return
	case fault != nil && fault.kind.answer != nil:
		fault.kind.answer(w)
		return
	}
	answered := &answerWriter{ResponseWriter: w, gate: g, gone: ctx.Done()}
	if fault != nil {
		answered.spoil = fault.kind.write
	}
	g.api.ServeHTTP(answered, r.WithContext(ctx))
	if g.isDead() && r.Context().Err() == nil {
		answered.endDead(chat)
	}
}

// enter registers a request; the death of the engine calls cancel. It applies the faults of the whole server that the request
// triggers, and returns the fault of this request, if there is one.
func (g *gate) enter(cancel context.CancelFunc) (id int, fault *Fault, dead bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.requests++
	for _, a := range g.armed {
		hit := g.triggered(a)
		switch {
		case hit && a.kind.act != nil:
			g.actLocked(a)
		case hit && fault == nil:
			fault = &a.Fault
		}
	}
	if !g.dead {
		g.inFlight[g.requests] = cancel
	}
	return g.requests, fault, g.dead
}

func (g *gate) leave(id int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.inFlight, id)
}

// triggered reports whether the current request triggers a fault. Each fault with p= draws once per request, so that its draws depend
// only on its seed and on the request's number.
func (g *gate) triggered(a *armed) bool {
	switch a.Trigger {
	case "request":
		return g.requests == a.Request
	case "p":
		return a.chance.Float64() < a.P
	case "at":
		since := time.Since(g.began) - a.At
		return since >= 0 && (a.For == 0 || since < a.For)
	}
	return g.running() >= a.Running
}

// watchEngine waits for the engine's death.
func (g *gate) watchEngine() {
	select {
	case <-g.core.dead:
		g.engineDied()
	case <-g.stopped:
	}
}

// engineDied does what an API server does when its engine has died. /health answers 503, streams get an error and end, new requests get
// an error, and after a while the server exits with code 0 (vllm/entrypoints/launcher.py, 0.14.1).
func (g *gate) engineDied() {
	g.live.freeze()
	logged, outlive := g.core.death()
	g.mu.Lock()
	g.dead = true
	cancels := slices.Collect(maps.Values(g.inFlight))
	g.mu.Unlock()
	g.log.engineLost(logged)
	for _, cancel := range cancels {
		cancel()
	}
	if os.Getenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1" {
		return
	}
	if g.pause(outlive) {
		g.end(false)
	}
}

// killEngine makes the engine die, with the exception of the fault, if it has one.
func (g *gate) killEngine(f Fault) {
	words := ""
	if f.kind.last != nil {
		words = f.kind.last(g.server.Profile, g.live.engine.Options)
	}
	g.core.kill(f, words)
}

// exit ends the server with exit code 0.
func (g *gate) exit(Fault) { g.end(true) }

// hang stops the engine while its API server lives on.
func (g *gate) hang(f Fault) {
	g.live.freeze()
	if g.pause(f.For) {
		g.live.thaw()
	}
}

// rejectDrafts is the fault no-acceptance, as with a drafter for another model.
func (g *gate) rejectDrafts(f Fault) {
	reject := func(now bool) { g.live.with(func(e *sim.Engine) { e.NoAcceptance = now }) }
	reject(true)
	if f.For > 0 && g.pause(f.For) {
		reject(false)
	}
}

// deaf makes the API server accept connections and send nothing, not even to requests in progress. It stays so while the server ends.
func (g *gate) deaf(f Fault) {
	silence := make(chan struct{})
	g.silence.Store(&silence)
	if g.pause(f.For) {
		g.silence.CompareAndSwap(&silence, nil)
		close(silence)
	}
}

// flood writes log lines as fast as the reader takes them.
func (g *gate) flood(f Fault) {
	const lines = 500 // about 64 KiB per write; one system call per line would be too slow
	for line, left := 0, f.Bytes; left > 0; {
		var b strings.Builder
		for range lines {
			line++
			fmt.Fprintf(&b, "%sWARNING %s [gpu_model_runner.py:2301] flood %010d: "+
				"the same warning again, of a library that nobody has told to be quiet\n",
				g.log.prefix(engineCore), time.Now().Format("01-02 15:04:05"), line)
		}
		text := strings.TrimSuffix(b.String(), "\n")
		g.log.write(g.log.out, "", text)
		left -= int64(len(text)) + 1
		select {
		case <-g.stopped:
			return
		default:
		}
	}
}
