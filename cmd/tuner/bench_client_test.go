package main

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"vllmtuner/foreign"
)

// guarded is the handler of an OpenAI-compatible server that requires a key and a header.
func guarded(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Authorization") != "Bearer sk-right" || r.Header.Get("X-Team") != "a, b" {
		http.Error(w, `{"error":"Unauthorized"}`, http.StatusUnauthorized)
		return
	}
	if r.Method == http.MethodGet {
		_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
		return
	}
	var q struct {
		N int `json:"max_tokens"`
	}
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for range q.N {
		_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
		w.(http.Flusher).Flush()
		time.Sleep(2 * time.Millisecond)
	}
	fmt.Fprintf(w, "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":%d}}\n\ndata: [DONE]\n\n", q.N)
}

// inProcess runs the command as main does, and returns its output and exit code.
func inProcess(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs strings.Builder
	err := app(&out, &errs, nil).RunContext(t.Context(), flagsFirst(append([]string{"tuner"}, args...)))
	printError(foreign.NewWriter(&errs), err)
	return out.String(), errs.String(), exitCode(err)
}

func TestBenchReachesAGuardedServer(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(guarded))
	server.StartTLS()
	defer server.Close()
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	authority := file("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	right, wrong := file("right", "sk-right\n"), file("wrong", "sk-wrong\n")
	t.Setenv("OPENAI_API_KEY", "")
	for _, row := range []struct {
		name   string
		args   []string
		key    string // value of OPENAI_API_KEY
		code   int
		stderr string
	}{
		{"the key and the authority are in files", []string{"--api-key-file", right, "--ca-file", authority, "--header", "X-Team: a, b"}, "", 0, ""},
		{"the key is in the environment, and the certificate is not checked", []string{"--insecure", "--header", "x-team:a, b"}, "sk-right", 0, ""},
		{"the certificate's authority is unknown", []string{"--header", "X-Team: a, b"}, "sk-right", 1, "--ca-file names the authority"},
		{"no key is sent", []string{"--insecure", "--header", "X-Team: a, b"}, "", 1, "tuner sent no API key: set OPENAI_API_KEY; or use --api-key-file"},
		{"the server refuses the key", []string{"--insecure", "--header", "X-Team: a, b", "--api-key-file", wrong}, "sk-right", 1, "check the API key"},
	} {
		t.Setenv("OPENAI_API_KEY", row.key)
		args := append([]string{"bench", "--url", server.URL, "--rate", "200", "--requests", "5", "--lead-in", "0s", "--input-tokens", "8", "--output-tokens", "3", "-o", "json"}, row.args...)
		stdout, stderr, code := inProcess(t, args...)
		if code != row.code || !strings.Contains(stderr, row.stderr) || row.code == 0 && !strings.Contains(stdout, `"failed": 0`) {
			t.Errorf("%s: code %d, want %d and %q:\n%s%s", row.name, code, row.code, row.stderr, stdout, stderr)
		}
		if strings.Contains(stdout+stderr, "sk-") {
			t.Errorf("%s: a key is printed:\n%s%s", row.name, stdout, stderr)
		}
	}
}

func TestBenchSaysWhenNothingCompletes(t *testing.T) {
	n := 0
	server := httptest.NewServer(opened(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost {
			if n++; n > 1 { // the preflight sends the first request
				http.Error(w, `{"error":{"message":"worn out"}}`, http.StatusServiceUnavailable)
				return
			}
		}
		guarded(w, r)
	}))
	defer server.Close()
	stdout, stderr, code := inProcess(t, "bench", "--url", server.URL, "--concurrency", "1", "--requests", "5", "--input-tokens", "8", "--output-tokens", "3")
	for _, want := range []string{"Failed requests:                         5", "  http-status:                           5", "first failure, http-status: 503: worn out"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("the report lacks %q:\n%s", want, stdout)
		}
	}
	if code != exitFailed || !strings.Contains(stderr, "concurrency 1: all 5 requests failed: 5 http-status") {
		t.Errorf("code %d, want %d:\n%s", code, exitFailed, stderr)
	}
	for line := range strings.Lines(stdout) {
		if len([]rune(line)) > 81 {
			t.Errorf("a line is longer than 80 columns: %s", line)
		}
	}
}

// opened adds a key and a header to each request, as the handler guarded requires them.
func opened(serve http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		r.Header.Set("Authorization", "Bearer sk-right")
		r.Header.Set("X-Team", "a, b")
		serve(w, r)
	}
}

// A bufferedWriter sends an answer only when it is complete, as a buffering proxy does.
type bufferedWriter struct{ http.ResponseWriter }

func (bufferedWriter) Flush() {}

// An answer that is not streamed meets any limit on TPOT. Runs with such answers are void, in a sweep and in a search.
func TestBenchSaysThatAnswersAreNotStreamed(t *testing.T) {
	server := httptest.NewServer(opened(func(w http.ResponseWriter, r *http.Request) { guarded(bufferedWriter{w}, r) }))
	defer server.Close()
	for _, args := range [][]string{
		{"--concurrency", "1", "--requests", "20", "--slo", "p50 tpot <= 50ms"},
		{"--concurrency", "1,2", "--requests", "20", "--slo", "p50 tpot <= 50ms"},
		{"--concurrency", "1", "--requests", "20", "-o", "csv"},
		{"--find-capacity", "--rate", "50", "--requests", "20", "--seconds", "1", "--lead-in", "0s", "--no-prime", "--slo", "p50 tpot <= 50ms"},
	} {
		stdout, stderr, code := inProcess(t, append([]string{"bench", "--url", server.URL, "--input-tokens", "8", "--output-tokens", "9"}, args...)...)
		if code != exitFailed || !strings.Contains(stderr, "is void: the answers are not streamed") || !strings.Contains(strings.ToLower(stdout), "void") ||
			strings.Contains(stdout, "passed") {
			t.Errorf("%v: code %d, want %d and void runs:\n%s%s", args, code, exitFailed, stdout, stderr)
		}
	}
}

// A search ends failing runs early. It still distinguishes a server that hangs from a server that breaks a limit, and
// reports the hang.
func TestASearchTellsAHangFromABrokenLimit(t *testing.T) {
	var asked atomic.Int32
	server := httptest.NewServer(opened(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPost && asked.Add(1) > 1 { // the preflight sends the first request
			_, _ = io.Copy(io.Discard, r.Body) // net/http notices a closed connection only after the body is read
			<-r.Context().Done()
			return
		}
		guarded(w, r)
	}))
	defer server.Close()
	stdout, stderr, code := inProcess(t, "bench", "--url", server.URL, "--find-capacity", "--rate", "100", "--requests", "100", "--seconds", "2", "--lead-in", "0s",
		"--no-prime", "--slo", "p99 ttft <= 300ms", "--input-tokens", "8", "--output-tokens", "3", "--idle-timeout", "1s")
	if code != exitFailed || !strings.Contains(stderr, "100 req/s: no request was completed, and then a single request failed too") {
		t.Errorf("code %d, want %d and a message that the server hangs:\n%s%s", code, exitFailed, stdout, stderr)
	}
}
