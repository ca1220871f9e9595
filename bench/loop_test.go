package bench

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench/workload"
)

func TestAClosedLoopKeepsItsSlotsFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inFlight, peak atomic.Int64
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			peak.Store(max(peak.Load(), inFlight.Add(1)))
			time.Sleep(100 * time.Millisecond)
			inFlight.Add(-1)
			s.answer(q.MaxTokens, 0, 0)
		})
		asap := func(yield func(workload.Arrival) bool) {
			for i := range 40 {
				request := ask(1)
				if !yield(workload.Arrival{Due: workload.Asap, Phase: workload.Window, Index: i, Request: &request}) {
					return
				}
			}
		}
		run, err := c.RunClosed(t.Context(), asap, 4, nil)
		if err != nil || c.MaxInFlight != 0 || peak.Load() != 4 || run.Elapsed != time.Second {
			t.Fatalf("%d at a time in %s, error %v, want 4 at a time in 1 s", peak.Load(), run.Elapsed, err)
		}
		for i, s := range run.Samples {
			if want := time.Duration(i/4) * 100 * time.Millisecond; s.Due != want || s.SendLag() != 0 || s.TTFT() != 100*time.Millisecond {
				t.Fatalf("request %d due at %s, send lag %s, TTFT %s, want due at %s when a slot was free, none and 100 ms", i, s.Due, s.SendLag(), s.TTFT(), want)
			}
		}
	})
}

// A user also waits for a slot. So the latency includes this wait, and the wait does not count as lateness of the
// client.
func TestWaitingForASlotIsInTheLatency(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) { s.answer(q.MaxTokens, time.Second, 0) })
		c.MaxInFlight = 1
		run, err := c.Run(t.Context(), requests(workload.Window, 3, 0, 500*time.Millisecond, ask(1)), nil)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range run.Samples {
			queued := time.Duration(i) * 500 * time.Millisecond
			if s.Queued != queued || s.SendLag() != 0 || s.TTFT() != time.Second+queued {
				t.Errorf("request %d queued %s, send lag %s, TTFT %s, want %s, none and %s", i, s.Queued, s.SendLag(), s.TTFT(), queued, time.Second+queued)
			}
		}
	})
}

func TestAConversationContinuesFromTheRealAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var seen []string
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			mu.Lock()
			seen = append(seen, fmt.Sprint(q.Messages))
			mu.Unlock()
			time.Sleep(time.Second)
			s.role()
			s.raw("data: %s\n\n", `{"choices":[{"delta":{"content":"The \"an"}}]}`)
			s.raw("data: %s\n\n", `{"choices":[{"delta":{"content":"swer\""}}]}`)
			s.usage(2)
			s.done()
		})
		c.Endpoint = workload.Chat
		second := func(answer string) (*workload.Request, time.Duration) {
			return &workload.Request{
				Messages:     []workload.Message{{Role: "assistant", Content: answer}, {Role: "user", Content: "and?"}},
				OutputTokens: 2, Conversation: 7, Turn: 2,
			}, 3 * time.Second
		}
		first := workload.Request{Text: "so?", OutputTokens: 2, Conversation: 7, Turn: 1, Next: second}
		run, err := c.Run(t.Context(), requests(workload.Window, 1, time.Second, 0, first), nil)
		if err != nil || len(run.Samples) != 2 {
			t.Fatalf("%d samples, error %v, want two turns", len(run.Samples), err)
		}
		if want := `[{assistant The "answer"} {user and?}]`; len(seen) != 2 || seen[1] != want {
			t.Errorf("the server saw %q, want %q in the second turn", seen, want)
		}
		last := run.Samples[1]
		if last.Due != 5*time.Second || last.Turn != 2 || last.Conversation != 7 || !last.LastTurn || run.Samples[0].LastTurn {
			t.Errorf("second turn %+v, want the last turn, due 3 s after the first answer", last)
		}
	})
}

func TestALargeRunKeepsOnlySums(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) { s.answer(q.MaxTokens, 10*time.Millisecond, 0) })
		c.MaxSamples = 50
		run, err := c.Run(t.Context(), requests(workload.Window, 500, 0, time.Millisecond, ask(1)), nil)
		if err != nil || run.Samples != nil || run.Tally == nil {
			t.Fatalf("%d samples, tally %v, error %v, want only a tally", len(run.Samples), run.Tally, err)
		}
		if m := Measure(run, Scope{Rate: 1000}); m.Requests != 500 || m.Completed != 500 || m.TTFT.P50 < 9.9 || m.TTFT.P50 > 10.1 {
			t.Errorf("measurement %+v, want 500 requests of 10 ms", m)
		}
	})
}

func TestConnectionsAreOpenedBeforeTheyAreNeeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var opened, early atomic.Int64
		var began atomic.Bool
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			began.Store(true)
			s.answer(q.MaxTokens, 50*time.Millisecond, 0)
		})
		dial := c.dial
		c.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			time.Sleep(time.Millisecond)
			opened.Add(1)
			if !began.Load() {
				early.Add(1)
			}
			return dial(ctx, network, address)
		}
		run, err := c.Run(t.Context(), requests(workload.Window, 100, 20*time.Millisecond, 2*time.Millisecond, ask(1)), nil)
		if err != nil {
			t.Fatal(err)
		}
		waited := 0
		for _, s := range run.Samples {
			if !s.OK() {
				t.Fatalf("sample %+v, want success", s)
			}
			if s.Connected > s.Sent {
				waited++
			}
		}
		if early.Load() < minIdle || waited > 0 {
			t.Errorf("%d of %d connections were opened before the first request, and %d of 100 requests waited for one, want %d and none",
				early.Load(), opened.Load(), waited, minIdle)
		}
	})
}

func TestAServerThatClosesIdleConnectionsLosesNoRequest(t *testing.T) {
	var asked atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		s, q := begin(t, w, r)
		s.answer(q.MaxTokens, 0, 0)
	}))
	server.Config.IdleTimeout = time.Millisecond // so short that any request may meet a connection that the server is closing
	server.Start()
	defer server.Close()
	c := &Client{URL: server.URL, Model: "tiny"}
	run, err := c.Run(t.Context(), requests(workload.Window, 200, 0, time.Millisecond, ask(1)), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range run.Samples {
		if !s.OK() {
			t.Errorf("sample %+v, want success", s)
		}
	}
	if asked.Load() != 200 {
		t.Errorf("the server answered %d requests, want each of 200 once", asked.Load())
	}
}

func TestTLSProxyAndHeaders(t *testing.T) {
	var header atomic.Pointer[http.Header]
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header.Store(&r.Header)
		s, q := begin(t, w, r)
		s.answer(q.MaxTokens, 20*time.Millisecond, 10*time.Millisecond)
	}))
	defer server.Close()
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // the client rejects the certificate, which the server would log
	server.StartTLS()
	var tunnels atomic.Int64
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		tunnels.Add(1)
		there, err := net.Dial("tcp", r.Host)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		w.WriteHeader(http.StatusOK)
		here, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		go func() {
			_, _ = io.Copy(there, here)
			there.Close()
		}()
		_, _ = io.Copy(here, there)
		here.Close()
	}))
	defer proxy.Close()
	through, err := url.Parse(proxy.URL)
	if err != nil {
		t.Fatal(err)
	}
	schedule := func() workload.Schedule { return requests(workload.Window, 5, 0, time.Millisecond, ask(3)) }
	t.Setenv("HTTPS_PROXY", "http://127.0.0.1:1") // nothing listens there; the client must ignore the variable

	c := &Client{URL: server.URL, Model: "tiny", Header: http.Header{"X-Team": {"search"}}, APIKey: "sk-1"}
	run, err := c.Run(t.Context(), schedule(), nil)
	if err != nil || run.Samples[0].Failure != Refused || !strings.Contains(run.Samples[0].Detail, "certificate") {
		t.Errorf("with an unknown certificate: %+v, error %v, want it refused for that", run.Samples[0], err)
	}
	c.TLS = server.Client().Transport.(*http.Transport).TLSClientConfig
	for _, c.Proxy = range []*url.URL{nil, through} {
		run, err := c.Run(t.Context(), schedule(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range run.Samples {
			if !s.OK() || s.TTFT() < 20*time.Millisecond || s.E2E() < 40*time.Millisecond { // a busy machine may bring tokens together
				t.Errorf("proxy %v: sample %+v, want success with times", c.Proxy, s)
			}
		}
		if h := *header.Load(); h.Get("X-Team") != "search" || h.Get("Authorization") != "Bearer sk-1" || !strings.HasPrefix(h.Get("X-Request-Id"), "tuner-") {
			t.Errorf("the server saw %v, want the header and the key", h)
		}
	}
	if tunnels.Load() == 0 {
		t.Error("no connection went through the proxy")
	}
}

// BenchmarkChunk measures the work of the client for one token, without the network.
func BenchmarkChunk(b *testing.B) {
	chunk := []byte(`data: {"id":"cmpl-tuner-0b1c2d3e-window-17","object":"text_completion","created":1790000000,"model":"meta-llama/Llama-3.3-70B-Instruct","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}` + "\n\n")
	framed := fmt.Appendf(nil, "%x\r\n%s\r\n", len(chunk), chunk)
	f := &runState{start: time.Now()}
	x := &exchange{state: f, at: -1, answer: answer{want: 1 << 60}}
	if _, err := x.feed([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"), f.start, f.start); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.SetBytes(int64(len(framed)))
	for b.Loop() {
		now := time.Now()
		if _, err := x.feed(framed, now, now); err != nil {
			b.Fatal(err)
		}
	}
	if x.answer.chunks == 0 || x.answer.failure != "" {
		b.Fatalf("%d chunks, failure %s", x.answer.chunks, x.answer.failure)
	}
}
