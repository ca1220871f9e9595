package truth

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// start starts a server that serves until the test ends.
func start(t *testing.T, config Config) *Server {
	t.Helper()
	server, err := Listen("127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	})
	return server
}

// post requests an answer of n tokens.
func post(t *testing.T, url, path, id, prompt string, n int) *http.Response {
	t.Helper()
	body := fmt.Sprintf(`{"model":"tiny",%s,"max_tokens":%d,"stream":true,"stream_options":{"include_usage":true}}`, prompt, n)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("X-Request-Id", id)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	return response
}

func TestAnAnswerIsWhatVLLMSends(t *testing.T) {
	server := start(t, Config{TTFT: time.Millisecond, TPOT: time.Millisecond})
	const (
		completion = `data: {"id":"cmpl-x","object":"text_completion","created":1767225600,"model":"tiny",`
		chat       = `data: {"id":"chatcmpl-x","object":"chat.completion.chunk","created":1767225600,"model":"tiny",`
	)
	tests := []struct{ path, prompt, want string }{
		{"/v1/completions", `"prompt":[5,6,7]`, completion + `"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}` + "\n\n" +
			completion + `"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}` + "\n\n" +
			completion + `"choices":[],"usage":{"prompt_tokens":3,"total_tokens":5,"completion_tokens":2}}` + "\n\ndata: [DONE]\n\n"},
		{"/v1/chat/completions", `"messages":[{"role":"user","content":"so?"}]`,
			chat + `"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}` + "\n\n" +
				chat + `"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}` + "\n\n" +
				chat + `"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":"length","token_ids":null}]}` + "\n\n" +
				chat + `"choices":[],"usage":{"prompt_tokens":1,"total_tokens":3,"completion_tokens":2}}` + "\n\ndata: [DONE]\n\n"},
	}
	for _, test := range tests {
		for range 2 { // the second request uses the same connection
			response := post(t, server.URL(), test.path, "x", test.prompt, 2)
			text, err := io.ReadAll(response.Body)
			response.Body.Close()
			if err != nil || string(text) != test.want || response.Header.Get("Content-Type") != "text/event-stream; charset=utf-8" {
				t.Errorf("%s answers %s, error %v:\n%s\nwant\n%s", test.path, response.Status, err, text, test.want)
			}
		}
	}
}

func TestTokensKeepTheirSchedule(t *testing.T) {
	const ttft, tpot, n = 50 * time.Millisecond, 10 * time.Millisecond, 20
	for _, step := range []bool{false, true} {
		server := start(t, Config{TTFT: ttft, TPOT: tpot, Step: step})
		before := time.Now()
		response := post(t, server.URL(), "/v1/completions", "seven-7", `"prompt":"so?"`, n)
		if _, err := io.Copy(io.Discard, response.Body); err != nil {
			t.Fatal(err)
		}
		took := time.Since(before)
		response.Body.Close()
		report, err := Fetch(t.Context(), server.URL())
		if err != nil {
			t.Fatal(err)
		}
		if report.Tokens != n || len(report.Requests) != 1 || report.CPU <= 0 {
			t.Fatalf("report %+v, want one request of %d tokens", report, n)
		}
		q := report.Requests[0]
		if q.ID != "seven-7" || len(q.Writes) != n || len(q.Gaps()) != n-1 {
			t.Fatalf("request %+v, want its id and %d tokens", q, n)
		}
		for i, due := range q.Due {
			want := q.Received + (ttft + time.Duration(i)*tpot).Microseconds()
			if on := due % tpot.Microseconds(); step && on != 0 || !step && due-want > 1 || due < want-1 {
				t.Errorf("in step %t: token %d is due at %d µs, want %d or the next step", step, i, due, want)
			}
			if q.Writes[i] < due-1 {
				t.Errorf("token %d left at %d µs, before it was due at %d", i, q.Writes[i], due)
			}
		}
		if q.TTFT() < ttft || q.TTFT() > took || q.TPOT() <= 0 {
			t.Errorf("TTFT %s, TPOT %s, want at least %s within the %s that it took", q.TTFT(), q.TPOT(), ttft, took)
		}
	}
}

func TestABadRequestIsRefused(t *testing.T) {
	server := start(t, Config{TPOT: time.Millisecond})
	response := post(t, server.URL(), "/v1/completions", "x", `"prompt":"so?"`, 0)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), "the request needs stream: true") {
		t.Errorf("a request for no tokens is answered with %s %q, %v", response.Status, text, err)
	}
	if _, err := Listen("127.0.0.1:0", Config{}); err == nil || !strings.Contains(err.Error(), "must be positive") {
		t.Errorf("Listen without a time per token = %v, want an error", err)
	}
}

// When a client closes its connection during an answer, the server stops writing tokens.
func TestAClientThatGoesAwayIsForgotten(t *testing.T) {
	server := start(t, Config{TPOT: time.Millisecond, Forget: true})
	response := post(t, server.URL(), "/v1/completions", "x", `"prompt":"so?"`, 1<<20)
	if _, err := response.Body.Read(make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	for deadline := time.Now().Add(45 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		one, err := Fetch(t.Context(), server.URL())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
		two, err := Fetch(t.Context(), server.URL())
		if err != nil {
			t.Fatal(err)
		}
		if one.Tokens == two.Tokens && len(two.Requests) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the server still writes tokens after 45 s: %d and then %d", one.Tokens, two.Tokens)
		}
	}
}
