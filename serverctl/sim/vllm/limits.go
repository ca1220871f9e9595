package vllm

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"golang.org/x/sync/semaphore"
)

// vLLM reads a body of any size. A simulated server runs beside the tests of a whole team, and must not take their machine.
const (
	maxBody   = 16 << 20         // several times the longest context that models have, as text or as token ids
	smallBody = 64 << 10         // any number of which may arrive at once
	bodiesIn  = 64 << 20         // bytes of larger ones that may
	bodyTime  = time.Minute      // for one to arrive
	bodiesNow = 1 << 20          // bytes of bodies that are looked into at once: each byte takes up to 350 then
	maxValues = 1 << 18          // in a body, or twice the model's length: a prompt of so many ids is refused anyway
	maxHead   = 64 << 10         // of a request's line and headers, uvicorn's own limit
	headTime  = 20 * time.Second // for them to arrive
	idleTime  = 5 * time.Minute  // that a connection may be open without a request
	maxConns  = 8192             // at once; others wait until they are accepted
)

// bodies share the memory for what is asked.
type bodies struct{ in, now *semaphore.Weighted }

func newBodies() bodies {
	return bodies{semaphore.NewWeighted(bodiesIn), semaphore.NewWeighted(bodiesNow)}
}

// readBody reads the body of a request. release must be called when it was looked into: others may wait for that.
func (a *api) readBody(w http.ResponseWriter, r *http.Request) (text []byte, release func(), _ *refusal) {
	none := func() {}
	size := r.ContentLength
	switch {
	case size > maxBody:
		w.Header().Set("Connection", "close") // what is still to come is not read
		return nil, none, tooLarge(fmt.Sprintf("%d bytes", maxBody))
	case size < 0:
		size = maxBody
	}
	if size > smallBody {
		if a.bodies.in.Acquire(r.Context(), size) != nil {
			return nil, none, &refused400
		}
		defer a.bodies.in.Release(size)
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyTime)) // a test's writer has none
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	_ = control.SetReadDeadline(time.Time{}) // else the connection would end while it is answered
	if _, isTooLarge := errors.AsType[*http.MaxBytesError](err); isTooLarge {
		return nil, none, tooLarge(fmt.Sprintf("%d bytes", maxBody))
	}
	if most := max(maxValues, 2*a.live.engine.Options.MaxModelLen); values(text) > most {
		return nil, none, tooLarge(fmt.Sprintf("%d values", most))
	}
	weight := min(int64(len(text)), bodiesNow)
	if err != nil || a.bodies.now.Acquire(r.Context(), weight) != nil {
		return nil, none, &refused400
	}
	return text, func() { a.bodies.now.Release(weight) }, nil
}

func tooLarge(most string) *refusal {
	return &refusal{status: http.StatusRequestEntityTooLarge, kind: "Request Entity Too Large",
		message: "The request body has more than " + most + ", the simulated server's limit"}
}

// values is about how many values a JSON text has: the commas between them. How deep they are is held against deepest.
func values(text []byte) (n int) {
	inString := false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			inString = !inString
		case inString && c == '\\':
			i++
		case !inString && c == ',':
			n++
		}
	}
	return n
}
