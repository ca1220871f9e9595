package bench

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench/workload"
)

// A connection keeps its time stamps when it is detached from the net package.
func TestADetachedSocketHasStamps(t *testing.T) {
	stamping(t)
	address, accept := accepting(t)
	opened, err := new(Client).open(t.Context(), new(net.Dialer).DialContext, address, nil)
	if err != nil || opened.net != nil {
		t.Fatalf("open = %+v, %v, want a plain socket", opened, err)
	}
	defer opened.discard()
	_, after := deliver(t, accept(), opened.fd)
	var buffer [16]byte
	if n, err := opened.receive(opened.fd, buffer[:]); n != 5 || err != nil || opened.arrived.After(after.Add(clientWait/2)) {
		t.Errorf("receive = %d, %v, %s after the arrival, want 5 bytes that came at least %s ago", n, err, opened.stamper.read.Sub(opened.arrived), clientWait)
	}
}

func TestChunksAreInTheSecondInWhichTheyCame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			s.role() // the role chunk comes early, the tokens come later
			s.answer(q.MaxTokens, 1500*time.Millisecond, time.Second)
		})
		run, err := c.Run(t.Context(), requests(workload.Window, 1, 2200*time.Millisecond, 0, ask(3)), nil)
		if err != nil {
			t.Fatal(err)
		}
		var chunks []int
		for _, second := range run.Series {
			chunks = append(chunks, second.Chunks)
		}
		// For completions the role chunk counts as a token, because it has choices.
		if want := []int{0, 0, 1, 1, 1, 1}; !slices.Equal(chunks, want) {
			t.Errorf("chunks by second %v, want %v", chunks, want)
		}
		if s := run.Series; s[2].Sent != 1 || s[2].InFlight != 1 || s[4].InFlight != 1 || s[5].Ended != 1 || s[5].InFlight != 0 {
			t.Errorf("series %+v, want one request from second 2 to second 5", s)
		}
	})
}

func TestTokensThatComeTogetherBlurTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		together := true
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			time.Sleep(100 * time.Millisecond)
			if together {
				s.raw("%s%s", token, token)
			} else {
				s.token()
				time.Sleep(time.Millisecond)
				s.token()
			}
			s.usage(2)
			s.done()
		})
		for _, want := range []time.Duration{100 * time.Millisecond, 0} {
			run, err := c.Run(t.Context(), requests(workload.Window, 1, 0, 0, ask(2)), nil)
			if err != nil || run.Samples[0].Blur != want {
				t.Errorf("blur %s, error %v, want %s", run.Samples[0].Blur, err, want)
			}
			together = false
		}
	})
}

func TestAConnectionThatDoesNotEndItsResponseIsClosed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var closed atomic.Int64
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			s.answer(q.MaxTokens, 0, 0)
			from := time.Now()
			<-r.Context().Done()
			closed.CompareAndSwap(0, int64(time.Since(from)))
		})
		run, err := c.Run(t.Context(), requests(workload.Window, 2, time.Second, 10*time.Second, ask(1)), nil)
		if err != nil || !run.Samples[0].OK() {
			t.Fatalf("%+v, %v, want success", run.Samples, err)
		}
		if after := time.Duration(closed.Load()); after < drainTime || after > drainTime+2*time.Second {
			t.Errorf("the connection was closed %s after the answer, want %s", after, drainTime)
		}
	})
}

func TestAnIdleConnectionIsRetired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) { s.answer(q.MaxTokens, 0, 0) })
		var conns atomic.Int64
		dial := c.dial
		c.dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			conns.Add(1)
			return dial(ctx, network, address)
		}
		if _, err := c.Run(t.Context(), requests(workload.Window, 30, 0, 2*staleAfter, ask(1)), nil); err != nil {
			t.Fatal(err)
		}
		// Each request comes when the connection of the previous one is stale, so it needs a new connection.
		if got := conns.Load(); got < 30 {
			t.Errorf("%d connections for 30 requests that are %s apart, want at least one for each", got, 2*staleAfter)
		}
	})
}

func TestARunGivesItsDescriptorsBack(t *testing.T) {
	c, _ := loopback(t, func(w http.ResponseWriter, r *http.Request) {
		s, q := begin(t, w, r)
		s.answer(q.MaxTokens, time.Millisecond, 0)
	})
	count := func() int {
		open, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(open)
	}
	before := 0
	for i := range 12 {
		if _, err := c.Run(t.Context(), requests(workload.Window, 20, 0, time.Millisecond, ask(1)), nil); err != nil {
			t.Fatal(err)
		}
		if i == 1 { // count after the first runs: they open descriptors that stay open, such as Go's own epoll
			before = count()
		}
	}
	// The server needs a moment to close its side of the last connections.
	for wait := time.Now().Add(45 * time.Second); count() > before+4 && time.Now().Before(wait); time.Sleep(time.Millisecond) {
	}
	if after := count(); after > before+4 {
		t.Errorf("%d open descriptors after 10 more runs, %d before", after, before)
	}
}

// A server may refuse a long request before it has read it all. The client must not send the rest of that request in
// front of the next one.
func TestAnEarlyRefusalSpoilsNoOtherRequest(t *testing.T) {
	next := make(chan struct{}) // closed when the next request has come on another connection
	var once sync.Once
	url, stop := listen(t, func(conn net.Conn) {
		head := make([]byte, 1024)
		n, err := conn.Read(head)
		if err != nil {
			return
		}
		if bytes.Contains(head[:n], []byte(`"prompt":"xxxx`)) {
			_, _ = io.WriteString(conn, plain("400 Bad", "application/json", `{"error":{"message":"too long"}}`))
			select { // the client sends its next request while the rest of the first is unread
			case <-next:
			case <-time.After(45 * time.Second):
				t.Error("the next request has not come")
			}
		} else {
			once.Do(func() { close(next) })
			_, _ = io.WriteString(conn, streamed+framed(whole)+theEnd)
		}
		_, _ = io.Copy(io.Discard, conn)
	})
	defer stop()
	c := &Client{URL: url, Model: "tiny", IdleTimeout: time.Minute}
	long := workload.Request{Text: strings.Repeat("x", 20<<20), OutputTokens: 3}
	run, err := c.Run(t.Context(), join(requests(workload.Window, 1, 0, 0, long), requests(workload.Window, 1, 50*time.Millisecond, 0, ask(3))), nil)
	if err != nil {
		t.Fatal(err)
	}
	if run.Samples[0].Failure != Status || !run.Samples[1].OK() {
		t.Errorf("%+v, want the first refused and the second good", run.Samples)
	}
	debug.FreeOSMemory()
}

func TestAServerThatClosesUnusedConnectionsGetsFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		network := &memory{conns: make(chan net.Conn), closed: make(chan struct{})}
		opened := 0
		var serving sync.WaitGroup
		serving.Go(func() {
			for conn, err := network.Accept(); err == nil; conn, err = network.Accept() {
				opened++
				serving.Go(func() {
					defer conn.Close()
					if conn.SetReadDeadline(time.Now().Add(10*time.Millisecond)) != nil { // the server closes a connection if no request comes within 10 ms
						return
					}
					if n, err := conn.Read(make([]byte, 4096)); n > 0 && err == nil {
						_, _ = io.WriteString(conn, streamed+framed(whole)+theEnd)
					}
				})
			}
		})
		c := &Client{URL: "http://server", Model: "tiny", dial: network.dial}
		// No request is due at the moment when a connection is closed: that would be a race.
		run, err := c.Run(t.Context(), requests(workload.Window, 20, 3*time.Millisecond, 20*time.Millisecond, ask(3)), nil)
		if err != nil {
			t.Fatal(err)
		}
		network.Close()
		serving.Wait()
		for _, s := range run.Samples {
			if !s.OK() {
				t.Errorf("sample %+v, want success", s)
			}
		}
		if opened > 20+4*minIdle {
			t.Errorf("%d connections for 20 requests, want hardly more than one for each", opened)
		}
	})
}

func TestALongConversationIsNotCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) { s.answer(max(q.MaxTokens, q.MaxChat), 8*time.Second, 0) })
		c.Endpoint, c.RunLimit = workload.Chat, 10*time.Second
		var next func(turn int) func(string) (*workload.Request, time.Duration)
		next = func(turn int) func(string) (*workload.Request, time.Duration) {
			if turn > 6 {
				return nil
			}
			return func(string) (*workload.Request, time.Duration) {
				return &workload.Request{Text: "and?", OutputTokens: 1, Turn: turn, Next: next(turn + 1)}, 9 * time.Second
			}
		}
		first := workload.Request{Text: "so?", OutputTokens: 1, Turn: 1, Next: next(2)}
		run, err := c.Run(t.Context(), requests(workload.Window, 1, 0, 0, first), nil)
		if err != nil || len(run.Samples) != 6 {
			t.Fatalf("%d turns, error %v, want 6", len(run.Samples), err)
		}
		for _, s := range run.Samples {
			if !s.OK() {
				t.Errorf("turn %+v, want success", s)
			}
		}
	})
}

func TestProgressIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			if q.MaxTokens == 2 {
				w := s.w
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			s.answer(q.MaxTokens, 2500*time.Millisecond, 0)
		})
		var seen []Progress
		c.Progress = func(p Progress) { seen = append(seen, p) }
		schedule := join(requests(workload.LeadIn, 1, 0, 0, ask(1)), requests(workload.Window, 4, 1500*time.Millisecond, 0, ask(1)),
			requests(workload.Window, 1, 1600*time.Millisecond, 0, ask(2)))
		if _, err := c.Run(t.Context(), schedule, nil); err != nil {
			t.Fatal(err)
		}
		if len(seen) < 3 {
			t.Fatalf("%d reports, want one each second", len(seen))
		}
		if p := seen[0]; p.Counted != 0 || p.InFlight != 1 || p.Ended != 0 {
			t.Errorf("after 1 s %+v, want only the lead-in's request", p)
		}
		if p := seen[1]; p.Counted != 5 || p.InFlight != 5 || p.Ended != 1 || p.Failed != 1 || p.TTFT99 != 0 {
			t.Errorf("after 2 s %+v, want five counted requests, one of them failed, and five in flight", p)
		}
	})
}

func TestSecretsInAServersTextAreHidden(t *testing.T) {
	c, _ := loopback(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, "you sent %q and %q", r.Header.Get("Authorization"), r.Header.Get("X-Token"))
	})
	c.APIKey, c.Header = "sk-WRONG", http.Header{"X-Token": {"Basic Zm9vOmJhcg=="}}
	run, err := c.Run(t.Context(), requests(workload.Window, 1, 0, 0, ask(1)), nil)
	if err != nil {
		t.Fatal(err)
	}
	if detail := run.Samples[0].Detail; strings.Contains(detail, "sk-WRONG") || strings.Contains(detail, "Zm9v") || !strings.Contains(detail, "you sent") {
		t.Errorf("detail %q shows a secret", detail)
	}
}
