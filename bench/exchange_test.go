package bench

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench/workload"
)

func TestEachFailureIsNamed(t *testing.T) {
	hijack := func(w http.ResponseWriter) net.Conn {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
		}
		return conn
	}
	tests := []struct {
		want   Failure
		detail string
		serve  func(w http.ResponseWriter, r *http.Request)
	}{
		{Reset, "EOF", func(w http.ResponseWriter, r *http.Request) { hijack(w).Close() }},
		{Reset, "broke during the answer", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.token()
			hijack(w).Close()
		}},
		{TimedOut, "no byte came for 300ms", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.token()
			<-r.Context().Done()
		}},
		{Status, "400: This model's maximum context length is 2048 tokens", func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"error":{"message":"This model's maximum context length is 2048 tokens","type":"BadRequestError","code":400}}`)
		}},
		{Status, "404: {\"detail\":\"Not Found\"}", func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"detail":"Not Found"}`)
		}},
		{Status, "503: Service Unavailable", func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }},
		{Status, "307: ", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}},
		{StreamError, "EngineCore encountered an issue", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.token()
			s.raw("data: %s\n\n", `{"error":{"message":"EngineCore encountered an issue. See stack trace","code":500}}`)
			s.done()
		}},
		{Truncated, "without [DONE]", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.token()
		}},
		{NoUsage, "include_usage", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.token()
			s.done()
		}},
		{NoTokens, "no token", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.usage(0)
			s.done()
		}},
		{WrongLength, "the server generated 2 tokens instead of 3", func(w http.ResponseWriter, r *http.Request) {
			s, _ := begin(t, w, r)
			s.answer(2, 0, 0)
		}},
		{Malformed, "<html>", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "<html>\n") }},
	}
	for _, test := range tests {
		t.Run(string(test.want)+" "+test.detail, func(t *testing.T) {
			c, _ := loopback(t, test.serve)
			c.IdleTimeout = 300 * time.Millisecond
			schedule := join(requests(workload.LeadIn, 1, 0, 0, ask(3)), requests(workload.Window, 1, 0, 0, ask(3)))
			run, err := c.Run(t.Context(), schedule, nil)
			if err != nil {
				t.Fatal(err)
			}
			s := run.Samples[0]
			if s.Failure != test.want || !strings.Contains(s.Detail, test.detail) || s.End == 0 || s.OK() {
				t.Errorf("sample %+v, want failure %q with %q", s, test.want, test.detail)
			}
			if run.Broken != 1 || run.Others != 1 || !strings.Contains(run.BrokenDetail, test.detail) {
				t.Errorf("%d of %d uncounted requests failed (%s), want 1 of 1", run.Broken, run.Others, run.BrokenDetail)
			}
		})
	}
}

func TestAServerThatIsGoneRefuses(t *testing.T) {
	c, server := loopback(t, nil)
	server.Close()
	run, err := c.Run(t.Context(), requests(workload.Window, 20, 0, time.Millisecond, ask(3)), nil)
	if err != nil {
		t.Fatal(err)
	}
	details := 0
	for _, s := range run.Samples {
		if s.Failure != Refused {
			t.Errorf("sample %+v, want %q", s, Refused)
		}
		if s.Detail != "" {
			details++
		}
	}
	if details != maxDetails {
		t.Errorf("%d failures have a text, want the first %d", details, maxDetails)
	}
}
