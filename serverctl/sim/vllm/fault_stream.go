package vllm

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"time"
)

const (
	// midway is the number of chunks that a client gets before a fault spoils its stream. Real answers are longer.
	midway = 3
	// lorisPause is how long the fault slow-loris waits between two bytes.
	lorisPause = time.Second
)

// An answerAction is the action of a fault that answers a request in place of the API.
type answerAction func(w http.ResponseWriter)

// A writeAction is the action of a fault that spoils an answer. It writes one piece of the answer in place of
// answerWriter.pass.
type writeAction func(w *answerWriter, piece []byte) (int, error)

var (
	errGone   = errors.New("the client has gone, or the server ends")
	errSpoilt = errors.New("a fault ended the stream")
)

// An answerWriter writes the answer to one request, unchanged or spoilt by a fault.
type answerWriter struct {
	http.ResponseWriter
	faults *faultHandler
	gone   <-chan struct{} // closed when the client has disconnected or the engine is dead
	spoil  writeAction     // nil when no fault spoils the answer

	chunks int
	began  bool // something was written
	whole  bool // the last chunk of a stream, or the body, was written
}

// Unwrap lets http.ResponseController reach the wrapped writer, to flush it.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Write writes one chunk of a stream, or a whole body. A fault may spoil it.
func (w *answerWriter) Write(piece []byte) (int, error) {
	if !w.faults.waitWhileSilent(w.gone) {
		return 0, errGone
	}
	if w.spoil != nil {
		return w.spoil(w, piece)
	}
	return w.pass(piece)
}

var lastChunk = []byte("data: [DONE]")

func (w *answerWriter) pass(piece []byte) (int, error) {
	w.chunks++
	w.began = true
	w.whole = w.whole || !w.streams() || bytes.HasPrefix(piece, lastChunk)
	return w.ResponseWriter.Write(piece)
}

func (w *answerWriter) streams() bool { return w.Header().Get("Content-Type") == eventStream }

func (w *answerWriter) flush() error { return http.NewResponseController(w.ResponseWriter).Flush() }

// halfway reports whether the fault shall spoil the answer at this piece. A fault acts in the middle of a stream, at
// the end of a short stream, or at the beginning of a body.
func (w *answerWriter) halfway(piece []byte) bool {
	return !w.streams() || w.chunks >= midway || bytes.HasPrefix(piece, lastChunk)
}

// endDead ends an answer whose engine has died. A stream has already sent status 200, so it gets an error chunk and
// [DONE] (completion_stream_generator in vllm/entrypoints/openai/serving_completion.py, 0.14.1; 0.32.0 does the same).
func (w *answerWriter) endDead() {
	switch {
	case w.whole || w.began && !w.streams():
	case !w.streams():
		refuse(w.ResponseWriter, deadEngine)
	default:
		w.faults.log.apiError("Error in completion stream generator.\n"+
			"vllm.v1.engine.exceptions.EngineDeadError: %s", deadEngine)
		_ = w.endWith(deadEngine) // fails only when the client has disconnected
	}
}

// endWith sends an error chunk and the last chunk, [DONE].
func (w *answerWriter) endWith(message string) error {
	text := fmt.Sprintf(`data: {"error": {"message": %q, "type": "InternalServerError", "param": null, "code": 500}}`+
		"\n\n%s\n\n", message, lastChunk)
	w.whole = true
	if _, err := w.ResponseWriter.Write([]byte(text)); err != nil {
		return err
	}
	return w.flush()
}

// refuse answers a request with status 500.
func refuse(w http.ResponseWriter, message string) {
	(&apiError{status: http.StatusInternalServerError, kind: "InternalServerError", message: message}).write(w)
}

// internalError applies the fault named status-500. vLLM gives this answer to a GenerationError
// (vllm/entrypoints/openai/serving_engine.py, 0.14.1).
func internalError(w http.ResponseWriter) { refuse(w, "Internal server error") }

// webPage applies the fault named wrong-type. The answer is a web page, as a proxy sends in place of a server.
func webPage(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	// An error only means that the client has disconnected.
	_, _ = w.Write([]byte("<!doctype html>\n<html><body><h1>It works!</h1></body></html>\n"))
}

// stopWriting applies the fault named stop-writing: in the middle of an answer the server stops, and the client waits
// for ever.
func stopWriting(w *answerWriter, piece []byte) (int, error) {
	if !w.halfway(piece) {
		return w.pass(piece)
	}
	<-w.gone
	return 0, errGone
}

// writeSlowly applies the fault named slow-loris: the answer comes at one byte a second.
func writeSlowly(w *answerWriter, piece []byte) (int, error) {
	for i := range piece {
		if _, err := w.ResponseWriter.Write(piece[i : i+1]); err != nil {
			return i, err
		}
		if err := w.flush(); err != nil {
			return i, err
		}
		w.began = true
		select {
		case <-w.gone:
			return i, errGone
		case <-time.After(lorisPause):
		}
	}
	w.whole = w.whole || !w.streams() || bytes.HasPrefix(piece, lastChunk)
	return len(piece), nil
}

// breakStream applies the fault named mid-stream-error: one request fails, and the others go on.
func breakStream(w *answerWriter, piece []byte) (int, error) {
	if !w.streams() || !w.halfway(piece) {
		return w.pass(piece)
	}
	w.faults.log.apiError("Request failed with an internal error during generation")
	if err := w.endWith("Internal server error"); err != nil {
		return 0, err
	}
	return 0, errSpoilt
}

// cutStream applies the fault named truncated: the connection closes in the middle of an answer, as when an API server
// is killed.
func cutStream(w *answerWriter, piece []byte) (int, error) {
	if !w.halfway(piece) {
		return w.pass(piece)
	}
	panic(http.ErrAbortHandler) // net/http recovers this panic and closes the connection
}
