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
	// watchdogTime is how long an API server outlives its engine: vLLM looks every five seconds (watchdog_loop in
	// vllm/entrypoints/launcher.py, 0.14.1), so it is five at most; 3.1 to 7.4 s were seen of 0.32.0 with its shutdown.
	watchdogTime = 5 * time.Second
	// runningLook is how often the running requests are counted for running=.
	runningLook = 5 * time.Millisecond
)

// A gate stands before the server's handler: through it the faults of the load reach the server, its clients, and single
// requests, and clients learn that the engine is dead. Without faults and with a living engine it changes nothing.
type gate struct {
	api    *api
	server *Server
	core   *core
	live   *live
	log    *logger
	began  time.Time // of the process

	ended   chan struct{} // closed when the server is to end by itself
	stopped chan struct{} // closed when it ends: faults are over
	actions sync.WaitGroup
	silence atomic.Pointer[chan struct{}] // while it is there and open, nothing is answered

	mu       sync.Mutex
	armed    []*armed
	requests int // completion requests so far
	flights  map[int]context.CancelFunc
	dead     bool // the engine is
	over     bool // ended is closed
	closed   bool // stopped is closed
	abrupt   bool // the end says goodbye to nobody
}

// An armed fault is one of the load with its memory.
type armed struct {
	Fault
	struck bool
	chance *rand.Rand // of p=
}

func newGate(s *Server, c *core, l *live, log *logger, began time.Time) *gate {
	g := &gate{
		api: newAPI(l, log), server: s, core: c, live: l, log: log, began: began,
		ended: make(chan struct{}), stopped: make(chan struct{}), flights: make(map[int]context.CancelFunc),
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

// open begins to watch the engine, and for what is to happen at a time or at so many running requests.
func (g *gate) open() {
	g.actions.Go(g.watchEngine)
	for _, a := range g.armed {
		switch {
		case a.kind.act == nil: // of single requests
		case a.Trigger == "at":
			g.actions.Go(func() {
				if g.pause(max(time.Nanosecond, time.Until(g.began.Add(a.At)))) {
					g.strike(a)
				}
			})
		case a.Trigger == "running":
			g.actions.Go(func() { g.awaitRunning(a) })
		}
	}
}

// close ends the faults and returns when nothing of them runs. It may be called again.
func (g *gate) close() {
	g.mu.Lock()
	if !g.closed {
		g.closed = true
		close(g.stopped)
	}
	g.mu.Unlock()
	g.actions.Wait()
}

// pause waits, for ever when d is 0, and reports whether the time has passed: false means that the server ends.
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
		if !g.pause(runningLook) {
			return
		}
	}
	g.strike(a)
}

func (g *gate) running() (n int) {
	g.live.with(func(e *sim.Engine) { n = e.Running() })
	return n
}

// strike lets a fault act on the whole server, once.
func (g *gate) strike(a *armed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.strikeOnce(a)
}

// strikeOnce is strike for those who have the mutex.
func (g *gate) strikeOnce(a *armed) {
	if a.struck || g.closed {
		return
	}
	a.struck = true
	g.actions.Go(func() { a.kind.act(g, a.Fault) })
}

// end ends the server. abrupt is without a word to anybody.
func (g *gate) end(abrupt bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.over {
		g.over, g.abrupt = true, abrupt
		close(g.ended)
	}
}

// ServeHTTP is the way of every request.
func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !g.hears(r.Context().Done()) {
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

// hears waits while the server is deaf, and reports false when the request is over.
func (g *gate) hears(gone <-chan struct{}) bool {
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

// completion lets a request through to the engine, with the fault that is meant for it.
func (g *gate) completion(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	number, fault, dead := g.enter(cancel)
	defer g.leave(number)
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
		answered.tellDead(chat)
	}
}

// enter counts a request in, with what ends it when the engine dies. It lets the faults act that it sets off, and returns the
// one that is meant for itself, if any.
func (g *gate) enter(cancel context.CancelFunc) (number int, fault *Fault, dead bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.requests++
	for _, a := range g.armed {
		hit := g.hits(a)
		switch {
		case hit && a.kind.act != nil:
			g.strikeOnce(a)
		case hit && fault == nil:
			fault = &a.Fault
		}
	}
	if !g.dead {
		g.flights[g.requests] = cancel
	}
	return g.requests, fault, g.dead
}

func (g *gate) leave(number int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.flights, number)
}

// hits reports whether a request sets a fault off by coming now. Each fault with p= draws once a request, so that its luck
// depends on its seed and the request's number alone.
func (g *gate) hits(a *armed) bool {
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

// engineDied does what an API server does whose engine is dead: health says 503, streams get an error and end, whoever comes
// gets an error, and after a while it ends in good order, with exit code 0 (vllm/entrypoints/launcher.py, 0.14.1).
func (g *gate) engineDied() {
	g.live.freeze()
	told, outlive := g.core.death()
	g.mu.Lock()
	g.dead = true
	inFlight := slices.Collect(maps.Values(g.flights))
	g.mu.Unlock()
	g.log.engineLost(told)
	for _, cancel := range inFlight {
		cancel()
	}
	if os.Getenv("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH") == "1" {
		return
	}
	if g.pause(outlive) {
		g.end(false)
	}
}

// killEngine is the death of the engine, with the words of the fault or without any.
func (g *gate) killEngine(f Fault) {
	words := ""
	if f.kind.last != nil {
		words = f.kind.last(g.server.Profile, g.live.engine.Options)
	}
	g.core.kill(f, words)
}

// exit is a server that ends as if all were well.
func (g *gate) exit(Fault) { g.end(true) }

// hang is an engine of which nothing comes any more, while its API server lives.
func (g *gate) hang(f Fault) {
	g.live.freeze()
	if g.pause(f.For) {
		g.live.thaw()
	}
}

// refuseDrafts is the fault no-acceptance: a drafter that does not go with the model.
func (g *gate) refuseDrafts(f Fault) {
	refuse := func(now bool) { g.live.with(func(e *sim.Engine) { e.NoAcceptance = now }) }
	refuse(true)
	if f.For > 0 && g.pause(f.For) {
		refuse(false)
	}
}

// deaf is an API server that accepts connections and answers nothing, not to old requests either. At the server's end it
// stays so.
func (g *gate) deaf(f Fault) {
	silence := make(chan struct{})
	g.silence.Store(&silence)
	if g.pause(f.For) {
		g.silence.CompareAndSwap(&silence, nil)
		close(silence)
	}
}

// flood writes lines as fast as they are taken.
func (g *gate) flood(f Fault) {
	const lines = 500 // about 64 KiB at once: a write for each line would be bound by the system calls
	for number, left := 0, f.Bytes; left > 0; {
		var b strings.Builder
		for range lines {
			number++
			fmt.Fprintf(&b, "%sWARNING %s [gpu_model_runner.py:2301] flood %010d: "+
				"the same warning again, of a library that nobody has told to be quiet\n",
				g.log.prefix(engineCore), time.Now().Format("01-02 15:04:05"), number)
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
