package vllm

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"time"
)

const (
	// midway is after how many chunks a stream is spoilt: enough to have begun, fewer than any real answer has.
	midway = 3
	// lorisPause is between two bytes of slow-loris.
	lorisPause = time.Second
)

// An answerAction is a fault that answers instead of the server.
type answerAction func(w http.ResponseWriter)

// A writeAction is a fault of the writing of an answer: it does something else with a piece of it.
type writeAction func(w *answerWriter, piece []byte) (int, error)

var (
	errGone   = errors.New("the client has gone, or the server ends")
	errSpoilt = errors.New("the stream was broken off by a fault")
)

// An answerWriter writes the answer to one request: as it is, or spoilt.
type answerWriter struct {
	http.ResponseWriter
	gate  *gate
	gone  <-chan struct{} // closed when the answer is wanted no longer, or its engine is dead
	spoil writeAction     // nil when nothing is wrong

	chunks int
	began  bool // something was written
	whole  bool // the last chunk was, or a body
}

// Unwrap lets http.ResponseController flush.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// Write writes a chunk of a stream, or a body.
func (w *answerWriter) Write(piece []byte) (int, error) {
	if !w.gate.hears(w.gone) {
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

// halfway reports whether a piece comes where an answer is to be spoilt: in the middle of a stream, at the end of a short
// one, or at the beginning of a body.
func (w *answerWriter) halfway(piece []byte) bool {
	return !w.streams() || w.chunks >= midway || bytes.HasPrefix(piece, lastChunk)
}

// tellDead ends an answer whose engine has died: a stream gets an error as its last chunk, under HTTP 200, and then [DONE]
// (completion_stream_generator in vllm/entrypoints/openai/serving_completion.py, 0.14.1; seen of 0.32.0).
func (w *answerWriter) tellDead(chat bool) {
	switch {
	case w.whole || w.began && !w.streams():
	case !w.streams():
		w.gate.release().refuseDead(w.ResponseWriter, chat)
	default:
		place, kind := w.gate.release().log.completionFailed, "completion"
		if chat {
			place, kind = w.gate.release().log.chatFailed, "chat completion"
		}
		w.gate.log.apiError(place, "Error in %s stream generator.\n"+
			"vllm.v1.engine.exceptions.EngineDeadError: %s", kind, deadEngine)
		_ = w.endWith(w.gate.release().toldDead()) // a client that has gone is told nothing
	}
}

// endWith sends an error as a chunk, and the last one.
func (w *answerWriter) endWith(message string) error {
	text := fmt.Sprintf(`data: {"error": {"message": %q, "type": "InternalServerError", "param": null, "code": 500}}`+
		"\n\n%s\n\n", message, lastChunk)
	w.whole = true
	if _, err := w.ResponseWriter.Write([]byte(text)); err != nil {
		return err
	}
	return w.flush()
}

// refuseDead answers a request that comes to a dead engine, or had no answer yet. The two routes of 0.14.1 turn the same
// exception into slightly different bodies (vllm/entrypoints/openai/api_server.py).
func (f *release) refuseDead(w http.ResponseWriter, chat bool) {
	kind := "InternalServerError"
	if chat && !f.modern {
		kind = "Internal Server Error"
	}
	(&apiError{status: http.StatusInternalServerError, kind: kind, message: f.toldDead()}).write(w)
}

// internalError is status-500 (GenerationError in vllm/entrypoints/openai/serving_engine.py, 0.14.1).
func internalError(w http.ResponseWriter) {
	(&apiError{status: http.StatusInternalServerError, kind: "InternalServerError", message: "Internal server error"}).write(w)
}

// webPage is wrong-type: what a proxy may answer in the server's stead.
func webPage(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	// A client that has gone is told nothing.
	_, _ = w.Write([]byte("<!doctype html>\n<html><body><h1>It works!</h1></body></html>\n"))
}

// stopWriting leaves the client waiting.
func stopWriting(w *answerWriter, piece []byte) (int, error) {
	if !w.halfway(piece) {
		return w.pass(piece)
	}
	<-w.gone
	return 0, errGone
}

// writeSlowly is a byte a second.
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

// breakStream ends a stream with an error, as a request that fails while others go on.
func breakStream(w *answerWriter, piece []byte) (int, error) {
	if !w.streams() || !w.halfway(piece) {
		return w.pass(piece)
	}
	w.gate.log.apiError("serving_engine.py:820", "Request failed with an internal error during generation")
	if err := w.endWith("Internal server error"); err != nil {
		return 0, err
	}
	return 0, errSpoilt
}

// cutStream closes the connection in the middle of a chunked answer: seen by clients when an API server is killed.
func cutStream(w *answerWriter, piece []byte) (int, error) {
	if !w.halfway(piece) {
		return w.pass(piece)
	}
	panic(http.ErrAbortHandler) // closes the connection without a word; net/http recovers it
}
