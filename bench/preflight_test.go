package bench

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench/workload"
)

// goodStream is a good answer of two tokens.
const goodStream = `data: {"choices":[{"text":"a"}]}

data: {"choices":[{"text":"b"}]}

data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}

data: [DONE]

`

// A front is an HTTP server for these tests, with a fixed answer for each path.
type front struct {
	models, stream, tokenize string
	status                   int // status of completions; 0 means 200
	modelsStatus             int
}

const oneModel = `{"object":"list","data":[{"id":"tiny","max_model_len":64}]}`

func (f front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status, text := http.StatusNotFound, `{"detail":"Not Found"}`
	switch {
	case r.URL.Path == "/v1/models" && f.models != "":
		status, text = max(f.modelsStatus, http.StatusOK), f.models
	case r.URL.Path == "/v1/completions" && f.stream != "":
		status, text = max(f.status, http.StatusOK), f.stream
	case r.URL.Path == "/tokenize" && f.tokenize != "":
		status, text = http.StatusOK, f.tokenize
	}
	if strings.HasPrefix(text, "data:") {
		w.Header().Set("Content-Type", "text/event-stream")
	}
	w.WriteHeader(status)
	_, _ = io.WriteString(w, text)
}

// closedPort returns an address that refuses connections.
func closedPort(t *testing.T) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func TestPreflightDistinguishesTroubles(t *testing.T) {
	const noUsage = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n"
	const three = "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":1}}\n\ndata: [DONE]\n\n"
	for _, row := range []struct {
		name  string
		front front
		model string
		kind  Trouble
		says  string
	}{
		{"a web page", front{models: "<!DOCTYPE html><html><title>Welcome to nginx!</title>"}, "", NotOpenAI, `does not answer with JSON but with "<!DOCTYPE html><html>`},
		{"JSON of another kind", front{models: `{"status":"ok"}`}, "", NotOpenAI, `names no model ("{\"status\":\"ok\"}")`},
		{"no list of models and no name", front{stream: goodStream}, "", NotOpenAI, "has no /v1/models"},
		{"a list that fails", front{models: "worn out", modelsStatus: 500}, "", NotOpenAI, `/v1/models answers 500: "worn out"`},
		{"a key is wanted", front{models: `{"error":"Unauthorized"}`, modelsStatus: 401}, "", Unauthorized, "tuner sent no API key: set OPENAI_API_KEY"},
		{"another model", front{models: oneModel, stream: goodStream}, "tinny", WrongModel, `does not serve the model "tinny"; it serves "tiny"`},
		{"an unknown model of a server without a list", front{stream: `{"error":{"message":"The model x does not exist."}}`, status: 404}, "x", WrongModel, "does not know the model"},
		{"a model without the endpoint", front{models: oneModel}, "tiny", NotOpenAI, "serves the model but not this endpoint"},
		{"an answer in one piece", front{models: oneModel, stream: `{"choices":[{"text":"ab"}],"usage":{}}`}, "", NotStreaming, "does not stream its answers"},
		{"no usage", front{models: oneModel, stream: noUsage}, "", NotStreaming, "ignores stream_options.include_usage"},
		{"lengths are not pinned", front{models: oneModel, stream: three}, "", BadAnswer, "the server generated 1 token instead of 2"},
		{"the request is refused", front{models: oneModel, stream: `{"error":{"message":"no such template"}}`, status: 400}, "", BadAnswer, "400: no such template"},
	} {
		server := httptest.NewServer(row.front)
		client := &Client{URL: server.URL, Model: row.model, IdleTimeout: 5 * time.Second}
		_, err := client.Preflight(t.Context())
		checkTrouble(t, row.name, err, row.kind, row.says)
		server.Close()
	}
}

func checkTrouble(t *testing.T, name string, err error, kind Trouble, says string) {
	t.Helper()
	if e, ok := errors.AsType[*PreflightError](err); !ok || e.Trouble != kind || !strings.Contains(e.Error(), says) {
		t.Errorf("%s: error %v, want %s with %q", name, err, kind, says)
	}
}

func TestPreflightOfAGoodServer(t *testing.T) {
	for _, row := range []struct {
		name   string
		front  front
		model  string
		length int
	}{
		{"the first model is taken", front{models: oneModel, stream: goodStream}, "", 64},
		{"a named one", front{models: oneModel, stream: goodStream}, "tiny", 64},
		{"a server without a list", front{stream: goodStream}, "tiny", 0},
	} {
		server := httptest.NewServer(row.front)
		client := &Client{URL: server.URL, Model: row.model}
		info, err := client.Preflight(t.Context())
		if err != nil || info.Model != "tiny" || info.MaxModelLen != row.length || client.Model != row.model {
			t.Errorf("%s: %+v, %v; want model tiny and length %d", row.name, info, err, row.length)
		}
		server.Close()
	}
}

func TestPreflightOfAnUnreachableServer(t *testing.T) {
	secure := httptest.NewUnstartedServer(front{models: oneModel, stream: goodStream})
	secure.Config.ErrorLog = log.New(io.Discard, "", 0) // the server would log each failed handshake
	secure.StartTLS()
	defer secure.Close()
	plain := httptest.NewServer(front{models: oneModel, stream: goodStream})
	defer plain.Close()
	for _, row := range []struct{ name, url, says string }{
		{"nothing listens", "http://" + closedPort(t), "the connection was refused, so nothing listens there"},
		{"no such name", "http://no-such-host.invalid:8000", `the name "no-such-host.invalid" has no address`},
		{"a certificate of an unknown authority", secure.URL, "give the file of its certificate authority"},
		{"TLS to a plain server", strings.Replace(plain.URL, "http:", "https:", 1), "write http:// instead of https://"},
		{"plain to a TLS server", strings.Replace(secure.URL, "https:", "http:", 1), "write https:// instead of http://"},
	} {
		_, err := (&Client{URL: row.url}).Preflight(t.Context())
		checkTrouble(t, row.name, err, Unreachable, row.says)
	}
	trusting := &Client{URL: secure.URL, TLS: &tls.Config{InsecureSkipVerify: true}}
	if _, err := trusting.Preflight(t.Context()); err != nil {
		t.Errorf("unchecked TLS: %v", err)
	}
}

func TestPreflightEndsWithItsContext(t *testing.T) {
	hang := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { cancel(); <-hang }))
	defer server.Close()
	defer close(hang)
	if _, err := (&Client{URL: server.URL}).Preflight(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Preflight = %v, want %v", err, context.Canceled)
	}
}

func TestPreflightNeverShowsTheKey(t *testing.T) {
	server := httptest.NewServer(front{models: `{"error":"no"}`, modelsStatus: 403})
	defer server.Close()
	_, err := (&Client{URL: server.URL, APIKey: "sk-top-secret"}).Preflight(t.Context())
	checkTrouble(t, "another key", err, Unauthorized, "check the API key")
	if strings.Contains(err.Error(), "top-secret") {
		t.Errorf("the error shows the key: %v", err)
	}
}

func TestCheckLengths(t *testing.T) {
	long, short := strings.Repeat("word ", 300), "short"
	ids := func(n int) *workload.Request {
		return &workload.Request{Tokens: make([]int32, n), OutputTokens: 10}
	}
	text := func(s string) *workload.Request { return &workload.Request{Text: s, OutputTokens: 10} }
	for _, row := range []struct {
		name      string
		front     front
		requests  []*workload.Request
		limit     int
		uncounted int
		says      string
	}{
		{"token ids fit", front{}, []*workload.Request{ids(90)}, 100, 0, ""},
		{"token ids are counted with their answer", front{}, []*workload.Request{ids(90), ids(91)}, 100, 0, "in 1 of 2 requests, prompt and answer together are longer than the server's max-model-len of 100 tokens: request 2 has 91 + 10;"},
		{"only the first are named", front{}, slices.Repeat([]*workload.Request{ids(95)}, 9), 100, 0, "request 3 has 95 + 10, 6 more;"},
		{"a text shorter in bytes needs no counting", front{}, []*workload.Request{text(short)}, 1000, 0, ""},
		{"a long text is counted and fits", front{tokenize: `{"count":300}`}, []*workload.Request{text(long)}, 1000, 0, ""},
		{"a long text is counted and does not fit", front{tokenize: `{"count":995}`}, []*workload.Request{text(short), text(long)}, 1000, 0, "request 2 has 995 + 10"},
		{"a server that cannot count", front{}, []*workload.Request{text(long)}, 1000, 1, ""},
		{"more than are counted", front{tokenize: `{"count":1}`}, slices.Repeat([]*workload.Request{text(long)}, maxCounted+7), 1000, 7, ""},
	} {
		server := httptest.NewServer(row.front)
		client := &Client{URL: server.URL, Model: "tiny"}
		uncounted, err := client.CheckLengths(t.Context(), slices.Values(row.requests), row.limit)
		if uncounted != row.uncounted || (err != nil) != (row.says != "") {
			t.Errorf("%s: %d are not counted, %v; want %d and %q", row.name, uncounted, err, row.uncounted, row.says)
		}
		if row.says != "" {
			checkTrouble(t, row.name, err, TooLong, row.says)
		}
		server.Close()
	}
}

func TestCountTokens(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body map[string]any
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Errorf("the request is not JSON: %v", err)
		}
		fmt.Fprintf(w, `{"count":%d}`, len(body))
	}))
	defer server.Close()
	client := &Client{URL: server.URL, Model: "tiny"}
	for _, row := range []struct {
		name    string
		request workload.Request
		want    int
	}{
		{"token ids are not sent", workload.Request{Tokens: make([]int32, 7)}, 7},
		{"a text with its model", workload.Request{Text: "a"}, 2},
		{"a chat with its model", workload.Request{Messages: []workload.Message{{Role: "user", Content: "a"}}}, 2},
	} {
		if n, err := client.countTokens(t.Context(), &row.request); n != row.want || err != nil {
			t.Errorf("%s: %d, %v; want %d", row.name, n, err, row.want)
		}
	}
}
