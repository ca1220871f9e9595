package vllm

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// These limits exist because a simulated server runs beside other programs, and must not use up their memory. vLLM
// reads a body of any size.
const (
	maxBody   = 16 << 20         // bytes; several times the longest context of a model, as text or as token ids
	smallBody = 64 << 10         // bytes; any number of smaller bodies may arrive at once
	bodiesIn  = 64 << 20         // bytes of all larger bodies together that may arrive at once
	bodyTime  = time.Minute      // time for a body to arrive
	maxValues = 1 << 18          // values in a JSON body, or 2 × MaxModelLen if that is more; vLLM refuses longer prompts anyway
	maxHead   = 64 << 10         // bytes of a request's first line and headers; uvicorn has the same limit
	headTime  = 20 * time.Second // time for the first line and the headers to arrive
	idleTime  = 5 * time.Minute  // time that a connection may stay open without a request
	maxConns  = 8192             // connections that are open at once; further clients wait
)

// readBody reads the body of a request, within the limits above.
func (a *api) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *apiError) {
	size := r.ContentLength
	switch {
	case size > maxBody:
		w.Header().Set("Connection", "close") // the rest is not read
		return nil, tooLarge(fmt.Sprintf("%d bytes", maxBody))
	case size < 0:
		size = maxBody
	}
	if size > smallBody {
		if err := a.bodies.Acquire(r.Context(), size); err != nil {
			return nil, badRequest("", "the body was not read: %v", err)
		}
		defer a.bodies.Release(size)
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Now().Add(bodyTime)) // fails only in tests, whose writer has no deadlines
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	_ = control.SetReadDeadline(time.Time{}) // without this, the deadline could cut off the answer
	maxCount := max(maxValues, 2*a.live.engine.Options.MaxModelLen)
	switch _, isTooLarge := errors.AsType[*http.MaxBytesError](err); {
	case isTooLarge:
		return nil, tooLarge(fmt.Sprintf("%d bytes", maxBody))
	case err != nil:
		return nil, badRequest("", "the body was not read: %v", err)
	case countValues(text) > maxCount:
		return nil, tooLarge(fmt.Sprintf("%d values", maxCount))
	}
	return text, nil
}

func tooLarge(limit string) *apiError {
	return &apiError{status: http.StatusRequestEntityTooLarge, kind: "Request Entity Too Large",
		message: "The request body has more than " + limit + ", the simulated server's limit"}
}

// countValues estimates the number of values in a JSON text by its commas. encoding/json itself limits how deep values
// may nest.
func countValues(text []byte) (n int) {
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
