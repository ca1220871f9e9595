package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"vllmtuner/bench/workload"
)

func TestLatenciesAreTrue(t *testing.T) {
	for _, endpoint := range []string{workload.Completions, workload.Chat} {
		synctest.Test(t, func(t *testing.T) {
			c := virtual(t, func(s stream, q asked, r *http.Request) {
				s.answer(max(q.MaxTokens, q.MaxChat), 100*time.Millisecond, 20*time.Millisecond)
			})
			c.Endpoint, c.ITL = endpoint, true
			request := workload.Request{Text: "how long?", OutputTokens: 50}
			run, err := c.Run(t.Context(), requests(workload.Window, 200, time.Second, 10*time.Millisecond, request), nil)
			if err != nil {
				t.Fatal(err)
			}
			m := Measure(run, Scope{Rate: 100, Start: time.Second, Length: 2 * time.Second})
			if m.Completed != 200 || m.OutputTokens != 200*50 || m.PromptTokens != 200*7 || m.CachedTokens != 200*4 {
				t.Errorf("%s: %+v, want 200 completed requests of 50 tokens", endpoint, m)
			}
			want := Stats{N: 200, Mean: 100, P50: 100, P90: 100, P95: 100, P99: 100, P999: 100, Max: 100}
			if m.TTFT != want {
				t.Errorf("%s: TTFT %+v, want 100 ms for all", endpoint, m.TTFT)
			}
			if m.TPOT.P99 != 20 || m.TPOT.P50 != 20 || m.ITL.N != 200*49 || m.ITL.Max != 20 || m.E2E.P99 != 100+49*20 {
				t.Errorf("%s: TPOT %+v, ITL %+v, E2E %+v, want 20 ms, 20 ms and 1,080 ms", endpoint, m.TPOT, m.ITL, m.E2E)
			}
			if m.SendLag.Max != 0 || run.Elapsed != time.Second+1990*time.Millisecond+1080*time.Millisecond {
				t.Errorf("%s: send lag %+v, elapsed %s, want none and 4.07 s", endpoint, m.SendLag, run.Elapsed)
			}
		})
	}
}

func TestTTFTCountsFromTheDueTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) { s.answer(q.MaxTokens, 30*time.Millisecond, 0) })
		late := func(yield func(workload.Arrival) bool) {
			time.Sleep(400 * time.Millisecond) // so the client gets the first request after its due time
			for a := range requests(workload.Window, 1, 100*time.Millisecond, 0, ask(2)) {
				yield(a)
			}
		}
		run, err := c.Run(t.Context(), late, nil)
		if err != nil {
			t.Fatal(err)
		}
		s := run.Samples[0]
		if s.SendLag() != 300*time.Millisecond || s.TTFT() != 330*time.Millisecond || s.E2E() != 330*time.Millisecond {
			t.Errorf("send lag %s, TTFT %s, E2E %s, want 300, 330 and 330 ms", s.SendLag(), s.TTFT(), s.E2E())
		}
	})
}

func TestTheRunOutGoesOnUntilTheLastCountedRequestHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inFlight atomic.Int32
		c := virtual(t, func(s stream, q asked, r *http.Request) {
			inFlight.Add(1)
			defer inFlight.Add(-1)
			select {
			case <-time.After(10 * time.Second):
				s.answer(q.MaxTokens, 0, 0)
			case <-r.Context().Done():
			}
		})
		endless := requests(workload.RunOut, 1<<30, 4*time.Second, time.Second, ask(3))
		schedule := join(
			requests(workload.LeadIn, 2, 0, time.Second, ask(3)),
			requests(workload.Window, 2, 2*time.Second, time.Second, ask(3)),
			endless)
		run, err := c.Run(t.Context(), schedule, nil)
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if run.Elapsed != 13*time.Second || inFlight.Load() != 0 {
			t.Errorf("the run took %s and left %d requests, want 13 s and none", run.Elapsed, inFlight.Load())
		}
		if len(run.Samples) != 2 || !run.Samples[0].OK() || !run.Samples[1].OK() || run.Broken != 0 {
			t.Errorf("%+v, want two good samples and no broken request", run)
		}
		// The tenth request of the run-out is due at 13 s, when the run ends, so it may be sent or not.
		if run.Others != 2+9 && run.Others != 2+10 {
			t.Errorf("%d uncounted requests, want 11 or 12", run.Others)
		}
	})
}

func TestARunEndsEarly(t *testing.T) {
	serverDied := errors.New("the server died")
	tests := []struct {
		name    string
		stop    func(now time.Duration, counted []Sample) bool
		cancel  time.Duration // 0 means never
		limit   time.Duration
		elapsed time.Duration
		err     error
		check   func(t *testing.T, run Run)
	}{
		{
			name: "when Stop says so, with pending samples left as they are",
			stop: func(now time.Duration, counted []Sample) bool {
				return slices.ContainsFunc(counted, func(s Sample) bool { return s.End == 0 && s.First == 0 && now-s.Due > 2*time.Second })
			},
			elapsed: 4 * time.Second,
			check: func(t *testing.T, run Run) {
				if !run.Stopped {
					t.Error("Stopped = false, want true")
				}
				if s := run.Samples[0]; !s.OK() {
					t.Errorf("first sample %+v, want one that had ended", s)
				}
				if s := run.Samples[1]; s.End != 0 || s.Failure != "" || s.First != 0 {
					t.Errorf("second sample %+v, want one that is pending", s)
				}
			},
		},
		{name: "when the context ends, with its cause", cancel: 2500 * time.Millisecond, elapsed: 2500 * time.Millisecond, err: serverDied},
		{
			name: "when the last answers take too long", limit: 30 * time.Second, elapsed: 31 * time.Second,
			check: func(t *testing.T, run Run) {
				if s := run.Samples[1]; s.Failure != NeverFinished || s.End != 31*time.Second || run.Stopped {
					t.Errorf("second sample %+v, want one that never finished", s)
				}
			},
		},
		{
			name: "when a server falls silent, by a failure", elapsed: 61 * time.Second,
			check: func(t *testing.T, run Run) {
				if s := run.Samples[1]; s.Failure != TimedOut || s.End != 61*time.Second || s.Detail != "no byte came for 1 min" {
					t.Errorf("second sample %+v, want one that timed out after a minute", s)
				}
			},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first := true
				c := virtual(t, func(s stream, q asked, r *http.Request) {
					if first {
						first = false
						s.answer(q.MaxTokens, time.Millisecond, 0)
						return
					}
					<-r.Context().Done()
				})
				c.RunLimit = test.limit
				ctx, cancel := context.WithCancelCause(t.Context())
				defer cancel(nil)
				if test.cancel > 0 {
					timer := time.AfterFunc(test.cancel, func() { cancel(serverDied) })
					defer timer.Stop()
				}
				run, err := c.Run(ctx, requests(workload.Window, 2, 0, time.Second, ask(1)), test.stop)
				if err != test.err || run.Elapsed != test.elapsed {
					t.Errorf("Run = %v after %s, want %v after %s", err, run.Elapsed, test.err, test.elapsed)
				}
				if test.check != nil {
					test.check(t, run)
				}
			})
		})
	}
}

func TestStopSeesFirstTokensOfPendingRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := virtual(t, func(s stream, q asked, r *http.Request) { s.answer(q.MaxTokens, 500*time.Millisecond, 10*time.Second) })
		var seen []Sample
		run, err := c.Run(t.Context(), requests(workload.Window, 1, 0, 0, ask(2)), func(now time.Duration, counted []Sample) bool {
			seen = append(seen, counted...)
			return false
		})
		if err != nil || len(seen) != 10 || run.Stopped {
			t.Fatalf("Run = %+v, %v, and called Stop %d times, want 10", run, err, len(seen))
		}
		if seen[0].First != 500*time.Millisecond || seen[0].End != 0 {
			t.Errorf("after a second Stop saw %+v, want a first token and no end", seen[0])
		}
	})
}

func TestAClientExplainsWhatIsWrong(t *testing.T) {
	chat := workload.Request{Messages: []workload.Message{{Role: "user", Content: "x"}}, OutputTokens: 1}
	tests := []struct {
		name    string
		client  Client
		request workload.Request
		want    string
	}{
		{"a URL without scheme", Client{URL: "localhost:8000", Model: "m"}, ask(1), "needs a scheme and a host, such as http://127.0.0.1:8000"},
		{"no model", Client{URL: "http://x"}, ask(1), "no model is named"},
		{"a misspelt endpoint", Client{URL: "http://x", Model: "m", Endpoint: "chats"}, ask(1), `unknown endpoint "chats"`},
		{"a chat at completions", Client{URL: "http://x", Model: "m"}, chat, "request 0 of the window: endpoint completions takes no chat messages: use endpoint chat"},
		{"token ids at chat", Client{URL: "http://x", Model: "m", Endpoint: workload.Chat}, ask(1), "endpoint chat takes no token ids"},
	}
	for _, test := range tests {
		_, err := test.client.Run(t.Context(), requests(workload.Window, 1, time.Hour, 0, test.request), nil)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: Run = %v, want %q", test.name, err, test.want)
		}
	}
}

func TestTheKeyIsSentAndNeverShown(t *testing.T) {
	const key = "sk-very-secret"
	var got atomic.Value
	c, _ := loopback(t, func(w http.ResponseWriter, r *http.Request) {
		got.Store(r.Header.Get("Authorization"))
		w.WriteHeader(http.StatusUnauthorized)
	})
	c.APIKey = key
	run, err := c.Run(t.Context(), requests(workload.Window, 1, 0, 0, ask(1)), nil)
	if err != nil || got.Load() != "Bearer "+key {
		t.Errorf("Run = %v, the server saw %q, want the key", err, got.Load())
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, shown := range []string{fmt.Sprintf("%v %+v %#v %s %x", c, *c, c.APIKey, c.APIKey, c.APIKey), string(text), fmt.Sprintf("%+v", run)} {
		if strings.Contains(shown, key) || strings.Contains(shown, fmt.Sprintf("%x", key)) {
			t.Errorf("%s shows the key", shown)
		}
	}
}

// A run leaves no goroutine and no connection behind. The test server has a goroutine for each connection, so the test
// counts only goroutines.
func TestARunLeavesNothingBehind(t *testing.T) {
	c, _ := loopback(t, func(w http.ResponseWriter, r *http.Request) {
		s, q := begin(t, w, r)
		if q.MaxTokens == 500 { // a request of the run-out lasts until the client withdraws it
			s.token()
			<-r.Context().Done()
			return
		}
		s.answer(q.MaxTokens, time.Millisecond, time.Millisecond)
	})
	before := runtime.NumGoroutine()
	schedule := join(requests(workload.Window, 50, 0, 2*time.Millisecond, ask(5)), requests(workload.RunOut, 1<<30, 100*time.Millisecond, 5*time.Millisecond, ask(500)))
	run, err := c.Run(t.Context(), schedule, nil)
	if err != nil || len(run.Samples) != 50 {
		t.Fatalf("Run = %+v, %v, want 50 samples", run, err)
	}
	for _, s := range run.Samples {
		if !s.OK() {
			t.Errorf("sample %+v, want success", s)
		}
	}
	waitForGoroutines(t, before)
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
