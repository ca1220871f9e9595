package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// When a server refuses or fails requests, tuner bench prints the server's message and guesses no remedy.
func TestAServerThatAnswersWithErrorsGetsNoGuess(t *testing.T) {
	for _, status := range []int{400, 413, 429, 500, 503} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method == http.MethodGet {
				_, _ = io.WriteString(w, `{"data":[{"id":"m"}]}`)
				return
			}
			http.Error(w, `{"error":{"message":"the words of the server"}}`, status)
		}))
		_, stderr, code := inProcess(t, "bench", "--url", server.URL, "--rate", "5", "--requests", "1", "--input-tokens", "4", "--output-tokens", "2")
		if code != exitFailed || !strings.Contains(stderr, "the words of the server") {
			t.Errorf("status %d: exit code %d, want %d and the server's message\n%s", status, code, exitFailed, stderr)
		}
		for _, guess := range []string{"--natural", "limits", "lower"} {
			if strings.Contains(stderr, guess) {
				t.Errorf("status %d: the message guesses the remedy %q: %s", status, guess, stderr)
			}
		}
		server.Close()
	}
}
