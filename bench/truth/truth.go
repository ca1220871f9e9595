// Package truth is a server for checking the measurements of a client. It streams answers as vLLM does, on a fixed
// schedule, and records when each request arrived and when it wrote each token. It also records how late it was itself.
// It never runs a model, and only tests start it.
package truth

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Config says when and how a Server answers.
type Config struct {
	TTFT   time.Duration // from the last byte of a request to its first token
	TPOT   time.Duration // from one token to the next
	Step   bool          // write the tokens of all streams together, once in every TPOT, as an engine does
	Forget bool          // record no requests, to save memory in runs of millions of requests
}

// A Server answers on one address. One goroutine writes all tokens. So a token costs little more than the call that
// writes it, and the client has most of the machine's CPU.
type Server struct {
	config   Config
	listener listener
	wake     int // eventfd that wakes the writer of tokens when there is a new stream, or at the end
	start    time.Time
	cpu      time.Duration // CPU time of the process before the start

	mu      sync.Mutex
	due     []*stream // streams, sorted by the due times of their next tokens
	tokens  int
	records []*Request // the report's requests; tokens are added while answers run
	ended   bool
}

// Listen opens a listener at an address, such as 127.0.0.1:0. The caller must call Serve, which closes the listener.
func Listen(address string, config Config) (*Server, error) {
	if config.TPOT <= 0 {
		return nil, fmt.Errorf("time per output token %s must be positive", config.TPOT)
	}
	opened, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("eventfd: %w", err), opened.Close())
	}
	return &Server{config: config, listener: listener{opened.(*net.TCPListener)}, wake: wake}, nil
}

// URL returns the server's base URL.
func (s *Server) URL() string { return "http://" + s.listener.Addr().String() }

// Serve answers requests until ctx ends, and then closes everything. It returns an error only if a system call fails.
func (s *Server) Serve(ctx context.Context) error {
	s.start, s.cpu = time.Now(), CPUTime()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/completions", s.answer)
	mux.HandleFunc("POST /v1/chat/completions", s.answer)
	mux.HandleFunc("GET "+reportPath, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(s.report()) // an error means that the client has gone
	})
	server := &http.Server{Handler: mux, ConnContext: keepConn}
	var writer sync.WaitGroup
	writer.Go(s.writeTokens)
	defer context.AfterFunc(ctx, func() { _ = server.Close() })() // makes server.Serve return
	err := server.Serve(s.listener)
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	err = errors.Join(err, server.Close()) // close all connections, so that writeTokens drops their streams
	s.mu.Lock()
	s.ended = true
	s.ring()
	s.mu.Unlock()
	writer.Wait()
	return err
}

// now returns the time since the server started.
func (s *Server) now() time.Duration { return time.Since(s.start) }

// report returns the report so far.
func (s *Server) report() *Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	report := &Report{Began: s.start, CPU: CPUTime() - s.cpu, Tokens: s.tokens}
	for _, record := range s.records {
		report.Requests = append(report.Requests, *record)
	}
	return report
}

// model is the name of the model in the answers.
const model = "tiny"

// A question holds the fields of a request that decide its answer.
type question struct {
	Prompt   json.RawMessage `json:"prompt"`
	Messages []struct {
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	MaxTokens     int  `json:"max_tokens"`
	MaxChatTokens int  `json:"max_completion_tokens"`
	Stream        bool `json:"stream"`
	Options       struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

func (q *question) tokens() int { return max(q.MaxTokens, q.MaxChatTokens) }

// promptTokens counts the token ids of a prompt. For a text it counts the words, roughly.
func (q *question) promptTokens() int {
	prompt := q.Prompt
	for _, m := range q.Messages {
		prompt = append(append(prompt, ' '), m.Content...)
	}
	return len(bytes.FieldsFunc(prompt, func(r rune) bool { return r == ',' || r == ' ' }))
}

// answer answers one request. Like uvicorn, it sends the head of the response before the first token.
func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	c := r.Context().Value(connKey{}).(*conn)
	received := c.arrived.Load().Sub(s.start)
	var q question
	if err = errors.Join(err, json.Unmarshal(body, &q)); err == nil && (!q.Stream || q.tokens() < 1) {
		err = errors.New("the request needs stream: true and max_tokens of at least 1")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	id := r.Header.Get("X-Request-Id")
	x := newStream(c, id, r.URL.Path == "/v1/chat/completions", &q)
	x.due = s.writeTime(received + s.config.TTFT)
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	if http.NewResponseController(w).Flush() != nil { // the client has gone
		return
	}
	s.begin(x, id, received)
	<-x.gone
	_, _ = w.Write(x.tail) // an error means that the client has gone
}

// begin schedules the first token of a stream.
func (s *Server) begin(x *stream, id string, received time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		close(x.gone)
		return
	}
	if !s.config.Forget {
		x.record = &Request{ID: id, Received: received.Microseconds(), Due: make([]int64, 0, x.left), Writes: make([]int64, 0, x.left)}
		s.records = append(s.records, x.record)
	}
	if s.schedule(x); s.due[0] == x {
		s.ring()
	}
}

// schedule inserts a stream into s.due, which is sorted. Most streams belong near the end, because all have the same
// time per token.
func (s *Server) schedule(x *stream) {
	at, _ := slices.BinarySearchFunc(s.due, x.due, func(other *stream, due time.Duration) int { return cmp.Compare(other.due, due) })
	s.due = slices.Insert(s.due, at, x)
}

// writeTime returns when the server writes a token that is ready at the given time. If Config.Step is set, the server
// writes the token at the end of the current step.
func (s *Server) writeTime(ready time.Duration) time.Duration {
	if !s.config.Step {
		return ready
	}
	return (ready + s.config.TPOT - 1).Truncate(s.config.TPOT)
}

// ring wakes writeTokens. The caller holds s.mu, so writeTokens has not closed the eventfd yet.
func (s *Server) ring() {
	_, _ = unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // the write fails only if the eventfd is full, and then the wait ends anyway
}

// writeTokens writes each token when it is due, until the server ends. It waits in ppoll, which counts in nanoseconds.
// On an idle machine Go's timers are up to a millisecond late.
func (s *Server) writeTokens() {
	defer unix.Close(s.wake) // an error does not matter: the descriptor is closed in any case
	for {
		wait, ended := s.writeDue()
		if ended {
			return
		}
		limit := unix.NsecToTimespec(int64(max(0, wait)))
		if n, _ := unix.Ppoll([]unix.PollFd{{Fd: int32(s.wake), Events: unix.POLLIN}}, &limit, nil); n > 0 {
			var count [8]byte
			_, _ = unix.Read(s.wake, count[:]) // resets the eventfd; no other goroutine reads it
		}
	}
}

// writeDue writes the tokens that are due now. It returns the time until the next token is due, and whether the server
// has ended.
func (s *Server) writeDue() (wait time.Duration, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for until := s.now(); len(s.due) > 0 && s.due[0].due <= until; {
		x := s.due[0]
		s.due = s.due[1:]
		s.writeToken(x)
	}
	wait = time.Hour
	if len(s.due) > 0 {
		wait = s.due[0].due - s.now()
	}
	return wait, s.ended && len(s.due) == 0
}

// writeToken writes the next token of a stream and schedules the one after it.
func (s *Server) writeToken(x *stream) {
	var err error
	if x.role != nil {
		_, err = x.to.Write(x.role)
		x.role = nil
	}
	chunk := x.token
	if x.left == 1 {
		chunk = x.last
	}
	at := s.now()
	if err == nil {
		_, err = x.to.Write(chunk)
	}
	if err == nil {
		s.tokens++
		if x.record != nil {
			x.record.Due = append(x.record.Due, x.due.Microseconds())
			x.record.Writes = append(x.record.Writes, at.Microseconds())
		}
	}
	x.due += s.config.TPOT
	if x.left--; x.left > 0 && err == nil {
		s.schedule(x)
		return
	}
	close(x.gone)
}
