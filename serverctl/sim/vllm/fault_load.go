package vllm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"vllmtuner/serverctl/sim"
)

const (
	// watchdogTime is how long an API server outlives its engine. vLLM checks every five seconds (watchdog_loop in
	// vllm/entrypoints/launcher.py, 0.14.1). In vLLM 0.32.0, this wait and the shutdown together took 3.1 to 7.4 s.
	watchdogTime = 5 * time.Second
	// runningPoll is how often the running requests are counted for the trigger running=.
	runningPoll = 5 * time.Millisecond
)

// A faultHandler is the handler in front of the API. It applies the faults under load to the server, to its clients and
// to single requests. It also tells clients when the engine is dead. If there are no faults and the engine lives, it
// changes nothing.
type faultHandler struct {
	api    *api
	server *Server
	core   *core
	live   *live
	log    *logger
	began  time.Time // start of the process

	ended   chan struct{} // closed to make the server end by itself
	stopped chan struct{} // closed when the server ends; this ends the faults
	actions sync.WaitGroup
	silence atomic.Pointer[chan struct{}] // while this holds an open channel, the server answers nothing

	endOnce sync.Once
	abrupt  bool // whether the server ends without closing its streams properly; set before ended is closed

	mu       sync.Mutex
	active   []*activeFault
	requests int  // completion requests so far
	closed   bool // whether the channel stopped is closed
}

// errEngineDead says why the contexts of all requests have ended: the engine has died.
var errEngineDead = errors.New("the engine is dead")

// isDead reports whether the engine died before the client of a request disconnected.
func isDead(r *http.Request) bool { return context.Cause(r.Context()) == errEngineDead }

// An activeFault is a fault under load with its state.
type activeFault struct {
	Fault
	acted  bool
	chance *rand.Rand // random numbers for the trigger p=
}

func newFaultHandler(s *Server, c *core, l *live, log *logger, began time.Time) *faultHandler {
	h := &faultHandler{
		api: newAPI(l, log), server: s, core: c, live: l, log: log, began: began,
		ended: make(chan struct{}), stopped: make(chan struct{}),
	}
	for _, f := range s.Faults {
		if f.Trigger != "" {
			h.active = append(h.active, &activeFault{Fault: f, chance: rand.New(rand.NewPCG(f.Seed, 0))})
		}
	}
	return h
}

// open starts to watch the engine and the triggers at= and running=. endRequests ends the contexts of all requests.
func (h *faultHandler) open(endRequests context.CancelCauseFunc) {
	h.actions.Go(func() { h.watchEngine(endRequests) })
	for _, a := range h.active {
		switch {
		case a.kind.act == nil: // the method enter applies this fault, because it acts on single requests
		case a.Trigger == "at":
			h.actions.Go(func() {
				if h.pause(max(time.Nanosecond, time.Until(h.began.Add(a.At)))) {
					h.act(a)
				}
			})
		case a.Trigger == "running":
			h.actions.Go(func() { h.awaitRunning(a) })
		}
	}
}

// close ends the faults and returns when all have ended. It may be called again.
func (h *faultHandler) close() {
	h.mu.Lock()
	if !h.closed {
		h.closed = true
		close(h.stopped)
	}
	h.mu.Unlock()
	h.actions.Wait()
}

// pause waits for the time d, or for ever if d is 0. It returns false when the server ends first.
func (h *faultHandler) pause(d time.Duration) bool {
	var over <-chan time.Time
	if d > 0 {
		over = time.After(d)
	}
	select {
	case <-over:
		return true
	case <-h.stopped:
		return false
	}
}

func (h *faultHandler) awaitRunning(a *activeFault) {
	for h.running() < a.Running {
		if !h.pause(runningPoll) {
			return
		}
	}
	h.act(a)
}

func (h *faultHandler) running() (n int) {
	h.live.withEngine(func(e *sim.Engine) { n = e.Running() })
	return n
}

// act applies a fault to the whole server, once.
func (h *faultHandler) act(a *activeFault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.actLocked(a)
}

// actLocked does the same as act, for callers that hold the mutex.
func (h *faultHandler) actLocked(a *activeFault) {
	if a.acted || h.closed {
		return
	}
	a.acted = true
	h.actions.Go(func() { a.kind.act(h, a.Fault) })
}

// end makes the server end. If abrupt is set, the server cuts its streams off.
func (h *faultHandler) end(abrupt bool) {
	h.endOnce.Do(func() {
		h.abrupt = abrupt
		close(h.ended)
	})
}

// ServeHTTP applies the faults to a request, and passes it to the API if the faults let it through.
func (h *faultHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !h.waitWhileSilent(r.Context().Done()) {
		return
	}
	switch r.URL.Path {
	case "/health", "/ping":
		if isDead(r) { // vllm/entrypoints/serve/instrumentator/health.py
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
	case "/v1/completions", "/v1/chat/completions":
		h.completion(w, r)
		return
	}
	h.api.ServeHTTP(w, r)
}

// waitWhileSilent waits while the fault named deaf keeps the server silent. It returns false when the request ends
// first.
func (h *faultHandler) waitWhileSilent(gone <-chan struct{}) bool {
	silence := h.silence.Load()
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

// completion passes a request to the API. If the request triggers a fault that acts on this request alone, completion
// applies the fault. A request that kills the engine still goes to the API. That request came while the engine lived,
// so its answer ends like the answers of the running requests.
func (h *faultHandler) completion(w http.ResponseWriter, r *http.Request) {
	if isDead(r) {
		refuse(w, deadEngine)
		return
	}
	fault := h.enter()
	if fault != nil && fault.kind.answer != nil {
		fault.kind.answer(w)
		return
	}
	answered := &answerWriter{ResponseWriter: w, faults: h, gone: r.Context().Done()}
	if fault != nil {
		answered.spoil = fault.kind.write
	}
	h.api.ServeHTTP(answered, r)
	if isDead(r) {
		answered.endDead()
	}
}

// enter counts a request. If the request triggers faults of the whole server, enter applies them. If it triggers a
// fault that acts on this request alone, enter returns that fault.
func (h *faultHandler) enter() (fault *Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.requests++
	for _, a := range h.active {
		hit := h.triggered(a)
		switch {
		case hit && a.kind.act != nil:
			h.actLocked(a)
		case hit && fault == nil:
			fault = &a.Fault
		}
	}
	return fault
}

// triggered reports whether the current request triggers a fault. A fault with the trigger p= draws one random number
// for each request. So the numbers depend only on the fault's seed and on the request's number.
func (h *faultHandler) triggered(a *activeFault) bool {
	switch a.Trigger {
	case "request":
		return h.requests == a.Request
	case "p":
		return a.chance.Float64() < a.P
	case "at":
		since := time.Since(h.began) - a.At
		return since >= 0 && (a.For == 0 || since < a.For)
	}
	return h.running() >= a.Running
}

// watchEngine makes the API server act as vLLM's does when its engine has died. /health answers 503, streams get an
// error and end, and new requests get an error. After a while the server exits with code 0
// (vllm/entrypoints/launcher.py, 0.14.1).
func (h *faultHandler) watchEngine(endRequests context.CancelCauseFunc) {
	select {
	case <-h.core.dead:
	case <-h.stopped:
		return
	}
	h.live.freeze()
	logged, outlive := h.core.death()
	h.log.engineLost(logged)
	endRequests(errEngineDead)
	if h.pause(outlive) {
		h.end(false)
	}
}

// killEngine makes the engine die. If the fault has an exception, the engine first logs that exception.
func (h *faultHandler) killEngine(f Fault) {
	exception := ""
	if f.kind.exception != "" {
		exception = deathOf(f, h.server.Profile, h.live.engine.Options)
	}
	h.core.kill(f, exception)
}

// exit applies the fault named exit-0. It ends the server with exit code 0.
func (h *faultHandler) exit(Fault) { h.end(true) }

// hang applies the fault named hang. It stops the engine while its API server lives on.
func (h *faultHandler) hang(f Fault) {
	h.live.freeze()
	if h.pause(f.For) {
		h.live.thaw()
	}
}

// rejectDrafts applies the fault named no-acceptance. The model then rejects every draft token, as if the drafter
// belonged to another model.
func (h *faultHandler) rejectDrafts(f Fault) {
	reject := func(now bool) { h.live.withEngine(func(e *sim.Engine) { e.NoAcceptance = now }) }
	reject(true)
	if f.For > 0 && h.pause(f.For) {
		reject(false)
	}
}

// ignoreClients applies the fault named deaf. It makes the API server accept connections and send nothing, not even to
// requests in progress. It also sends nothing while the server ends.
func (h *faultHandler) ignoreClients(f Fault) {
	silence := make(chan struct{})
	h.silence.Store(&silence)
	if h.pause(f.For) {
		h.silence.CompareAndSwap(&silence, nil)
		close(silence)
	}
}

// flood applies the fault named flood. It writes log lines as fast as the reader takes them.
func (h *faultHandler) flood(f Fault) {
	const lines = 500 // about 64 KiB per write; one system call per line would be too slow
	for line, left := 0, f.Bytes; left > 0; {
		var b strings.Builder
		for range lines {
			line++
			fmt.Fprintf(&b, "%sWARNING %s [simulated:1] flood %010d: "+
				"the same warning again, of a library that nobody has told to be quiet\n",
				h.log.prefix(engineCore), time.Now().Format("01-02 15:04:05"), line)
		}
		text := strings.TrimSuffix(b.String(), "\n")
		h.log.write(h.log.out, "", text)
		left -= int64(len(text)) + 1
		select {
		case <-h.stopped:
			return
		default:
		}
	}
}
