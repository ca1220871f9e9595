package vllm

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// A logBuffer is a log that the server writes and the test reads.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// serve starts a server with the profile small-fast, and returns its URL and log.
func serve(t *testing.T, args ...string) (string, *logBuffer) {
	t.Helper()
	return serveWith(t, &Server{Profile: profile(t, "small-fast")}, args...)
}

// serveWith starts a server and waits until it answers. The server ends with the test.
func serveWith(t *testing.T, s *Server, args ...string) (string, *logBuffer) {
	t.Helper()
	port := freePort(t)
	ctx, cancel := context.WithCancel(t.Context())
	log, done := new(logBuffer), make(chan error, 1)
	s.Out = log
	go func() { done <- s.Serve(ctx, append(slices.Clone(args), "--port", port)) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil && err != context.Canceled {
			t.Errorf("Serve ends with %v", err)
		}
	})
	url := "http://127.0.0.1:" + port
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if resp, err := http.Get(url + "/health"); err == nil {
			resp.Body.Close()
			return url, log
		}
	}
	t.Fatalf("the server is not ready after %v; its log:\n%s", limit, log)
	return "", nil
}

// freePort returns a port that is free at this moment.
func freePort(t *testing.T) string {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer free.Close()
	return fmt.Sprint(free.Addr().(*net.TCPAddr).Port)
}

func post(t *testing.T, url, body string) (int, string) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(text)
}

// A stream has one chunk for each token, then the usage and [DONE]. The log says that the cache was reset, because
// serverctl reads that line. The numbers in the metrics have Python's form.
func TestServeSpeaksVLLM(t *testing.T) {
	t.Setenv("VLLM_SERVER_DEV_MODE", "1")
	url, log := serve(t, "some/model", "--served-model-name", "m", "--max-num-seqs", "8", "--max-model-len", "4096")
	status, text := post(t, url+"/v1/completions", `{"model":"m","prompt":[1,2,3,4],"max_tokens":3,"stream":true,"stream_options":{"include_usage":true}}`)
	chunks := strings.Split(strings.TrimSpace(text), "\n\n")
	if status != 200 || len(chunks) != 5 || chunks[4] != "data: [DONE]" ||
		!strings.Contains(chunks[2], `"finish_reason":"length"`) ||
		!strings.Contains(chunks[3], `"choices":[],"usage":{"prompt_tokens":4,"total_tokens":7,"completion_tokens":3}`) {
		t.Errorf("completions stream: status %d, chunks %q; want three tokens, usage and [DONE]", status, chunks)
	}
	if status, text := post(t, url+"/tokenize", `{"prompt":"abcdefgh ij"}`); status != 200 || !strings.Contains(text, `"count":3`) {
		t.Errorf("/tokenize: %d %q, want three tokens", status, text)
	}
	if status, _ := post(t, url+"/reset_prefix_cache", ""); status != 200 || !strings.Contains(log.String(), "Successfully reset prefix cache") {
		t.Errorf("the reset of the cache: status %d; its log line is missing", status)
	}
	text = sendRecorded(t, url, recordedRequest{Method: "GET", Path: "/metrics"}).Body
	if line := `vllm:generation_tokens_total{engine="0",model_name="m"} 3.0`; !strings.Contains(text, line) {
		t.Errorf("metrics lack %q", line)
	}
}

// With --enable-prompt-tokens-details the usage has the number of cached tokens, which bench reads.
func TestUsageHasTheCachedTokens(t *testing.T) {
	url, _ := serveAs(t, "0.33.0", "--served-model-name", "m", "--enable-prompt-tokens-details")
	body := `{"prompt":"` + strings.Repeat("one two three ", 40) + `","max_tokens":2%s}`
	for _, row := range []struct{ name, more, want string }{
		{"the first answer", "", `"prompt_tokens_details":null`},
		{"the second answer", "", `"prompt_tokens_details":{"cached_tokens":`},
		{"a stream", `,"stream":true,"stream_options":{"include_usage":true}`, `"prompt_tokens_details":{"cached_tokens":`},
	} {
		if status, text := post(t, url+"/v1/completions", fmt.Sprintf(body, row.more)); status != 200 || !strings.Contains(text, row.want) {
			t.Errorf("%s: status %d, %s; want %s", row.name, status, text, row.want)
		}
	}
}

// When a client disconnects, its request leaves the engine.
func TestServeDropsRequestsOfDisconnectedClients(t *testing.T) {
	url, _ := serve(t, "--served-model-name", "m", "--max-model-len", "8192")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", strings.NewReader(`{"prompt":"hi","max_tokens":8000,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := resp.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	await(t, "the request of the disconnected client has left the engine", func() bool {
		running, ok := scraped(t, url)["vllm:num_requests_running{}"]
		return ok && running == 0
	})
	if text := sendRecorded(t, url, recordedRequest{Method: "GET", Path: "/metrics"}).Body; strings.Contains(text, `vllm:generation_tokens_total{engine="0",model_name="m"} 8000.0`) {
		t.Error("the engine has generated all 8,000 tokens")
	}
}

func TestServeRefusesAsVLLMDoes(t *testing.T) {
	p := profile(t, "small-fast")
	for _, row := range []struct {
		name string
		args []string
		want string
	}{
		{"a context beyond all memory", []string{"m", "--max-model-len", "9000000000000000000", "--port", "0"}, "To serve at least one request"},
		{"a port beyond 16 bits", []string{"m", "--port", "99999"}, "OverflowError: bind(): port must be 0-65535."},
		{"a negative port", []string{"m", "--port", "-1"}, "OverflowError: bind(): port must be 0-65535."},
	} {
		err := (&Server{Profile: p, Out: io.Discard}).Serve(t.Context(), row.args)
		if err == nil || ExitCode(err) != 1 || !strings.Contains(err.Error(), row.want) {
			t.Errorf("%s: Serve = %v (code %d), want code 1 with %q", row.name, err, ExitCode(err), row.want)
		}
	}
}
