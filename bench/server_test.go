package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"vllmtuner/bench/workload"
)

// asked is the part of a request that the servers of these tests read.
type asked struct {
	Model       string             `json:"model"`
	Prompt      json.RawMessage    `json:"prompt"`
	Messages    []workload.Message `json:"messages"`
	MaxTokens   int                `json:"max_tokens"`
	MaxChat     int                `json:"max_completion_tokens"`
	MinTokens   int                `json:"min_tokens"`
	IgnoreEOS   bool               `json:"ignore_eos"`
	Temperature *float64           `json:"temperature"`
	Stream      bool               `json:"stream"`
	Options     struct {
		IncludeUsage bool `json:"include_usage"`
	} `json:"stream_options"`
}

// A stream writes an answer as vLLM does.
type stream struct {
	t    *testing.T
	w    http.ResponseWriter
	chat bool
}

func begin(t *testing.T, w http.ResponseWriter, r *http.Request) (stream, asked) {
	var q asked
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		t.Errorf("request body: %v", err)
	}
	w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	return stream{t, w, r.URL.Path == "/v1/chat/completions"}, q
}

func (s stream) raw(format string, args ...any) {
	fmt.Fprintf(s.w, format, args...) // an error means that the client has gone, which the server may ignore
	s.w.(http.Flusher).Flush()
}

func (s stream) role() {
	s.raw("data: %s\n\n", `{"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`)
}

func (s stream) token() {
	if s.chat {
		s.raw("data: %s\n\n", `{"id":"c","choices":[{"index":0,"delta":{"content":" a"},"logprobs":null,"finish_reason":null}]}`)
		return
	}
	s.raw("data: %s\n\n", `{"id":"c","choices":[{"index":0,"text":" a","logprobs":null,"finish_reason":null}],"usage":null}`)
}

func (s stream) usage(tokens int) {
	s.raw(`data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":4}}}`+"\n\n", 7+tokens, tokens)
}

func (s stream) done() { s.raw("data: [DONE]\n\n") }

// answer sends a whole answer: the first token after ttft, and each further token after another tpot.
func (s stream) answer(tokens int, ttft, tpot time.Duration) {
	time.Sleep(ttft)
	if s.chat {
		s.role()
	}
	for i := range tokens {
		if i > 0 {
			time.Sleep(tpot)
		}
		s.token()
	}
	s.usage(tokens)
	s.done()
}

// requests yields n arrivals of a phase. The first arrival is due at firstDue, and each further one is due one gap
// later.
func requests(phase workload.Phase, n int, firstDue, gap time.Duration, request workload.Request) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for i := range n {
			if !yield(workload.Arrival{Due: firstDue + time.Duration(i)*gap, Phase: phase, Index: i, Request: &request}) {
				return
			}
		}
	}
}

func join(schedules ...workload.Schedule) workload.Schedule {
	return func(yield func(workload.Arrival) bool) {
		for _, schedule := range schedules {
			for a := range schedule {
				if !yield(a) {
					return
				}
			}
		}
	}
}

func ask(tokens int) workload.Request {
	return workload.Request{Tokens: []int32{5, 6, 7}, PromptTokens: 3, OutputTokens: tokens}
}

// memory is a type of network that stays within this process, for tests in virtual time.
type memory struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (m *memory) Accept() (net.Conn, error) {
	select {
	case conn := <-m.conns:
		return conn, nil
	case <-m.closed:
		return nil, net.ErrClosed
	}
}

func (m *memory) Close() error {
	m.once.Do(func() { close(m.closed) })
	return nil
}

func (m *memory) Addr() net.Addr { return &net.TCPAddr{} }

func (m *memory) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	select {
	case m.conns <- there:
		return here, nil
	case <-m.closed:
		return nil, &net.OpError{Op: "dial", Err: net.ErrClosed}
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// virtual returns a client for a server within this process. It must be called in a synctest bubble.
func virtual(t *testing.T, handler func(stream, asked, *http.Request)) *Client {
	network := &memory{conns: make(chan net.Conn), closed: make(chan struct{})}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s, q := begin(t, w, r)
		handler(s, q, r)
	})}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(network) })
	t.Cleanup(func() {
		server.Close()
		serving.Wait()
	})
	return &Client{URL: "http://server", Model: "tiny", dial: network.dial}
}

// loopback returns a client for a server on the loopback interface.
func loopback(t *testing.T, handler http.HandlerFunc) (*Client, *httptest.Server) {
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return &Client{URL: server.URL, Model: "tiny"}, server
}
