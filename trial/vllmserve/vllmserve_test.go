package vllmserve

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl/proc"
	"vllmtuner/trial/slo"
	"vllmtuner/trial/vllmserve/fakevllm"
)

func TestMain(m *testing.M) {
	proc.Main()
	if os.Getenv("FAKE_VLLM") != "" {
		fakevllm.Main()
		return
	}
	os.Setenv("GORACE", "atexit_sleep_ms=10") // without this, each child would sleep for a second at its end
	os.Exit(m.Run())
}

// fakeLoad returns a Load that runs this test binary instead of vllm. The parameter failure names the way in which the
// fake vllm fails.
func fakeLoad(t *testing.T, failure string) *Load {
	return &Load{
		Command: []string{os.Args[0], "bench", "serve"}, Env: []string{"FAKE_VLLM=" + failure}, Dir: t.TempDir(), Tokenizer: "some/model",
		Client: &bench.Client{URL: "http://127.0.0.1:1", Model: "served", APIKey: "sk-secret"},
	}
}

// textPlan returns the plan of one probe with text prompts.
func textPlan(t *testing.T) workload.Plan {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data.jsonl")
	var rows strings.Builder
	for i := range 20 {
		fmt.Fprintf(&rows, `{"prompt": "tell me about \"%d\"", "output_tokens": %d}`+"\n", i, 5+i)
	}
	if err := os.WriteFile(path, []byte(rows.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	source, err := workload.Open(workload.Spec{Kind: "jsonl", Path: path}, 1)
	if err != nil {
		t.Fatal(err)
	}
	return workload.Plan{Source: source, Seed: 1, Rate: 0.5, LeadIn: 10 * time.Second, Window: 60 * time.Second, MinRequests: 20}
}

func TestLoadGivesTheSameKindOfProbe(t *testing.T) {
	log := filepath.Join(t.TempDir(), "args")
	load, plan := fakeLoad(t, "good"), textPlan(t)
	load.Env = append(load.Env, "FAKE_VLLM_ARGS="+log)
	run, err := load.Run(t.Context(), plan.Schedule(), nil)
	if err != nil {
		t.Fatal(err)
	}
	n, window := plan.Counted()
	m := bench.Measure(run, bench.Scope{Rate: plan.Rate, Start: plan.LeadIn, Length: window})
	if m.Requests != n || m.Completed != n || m.TTFT.P99 != 50 || m.TPOT.P99 != 10 || m.OutputTokens != m.WantTokens || run.Others == 0 || m.Void != "" {
		t.Errorf("%d requests, %d completed, TTFT %g, TPOT %g, %d of %d tokens, %d others, void %q; want %d of 50 and 10 ms",
			m.Requests, m.Completed, m.TTFT.P99, m.TPOT.P99, m.OutputTokens, m.WantTokens, run.Others, m.Void, n)
	}
	drawn := float64(n) / window.Seconds()
	if got := m.RequestThroughput; math.Abs(got/drawn-1) > 0.1 {
		t.Errorf("the throughput is %g req/s where %g were due", got, drawn)
	}
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 95, Max: time.Second}}}
	if v := limits.Judge(run.Samples, n, run.Elapsed); !v.Pass {
		t.Errorf("the verdict is %+v", v)
	}
	checkCalls(t, log, n, drawn)
	if left, _ := filepath.Glob(filepath.Join(load.Dir, "*")); len(left) > 0 {
		t.Errorf("%v are left behind", left)
	}
}

// checkCalls checks the command lines for the lead-in and the window. Both lines must have the options of vLLM 0.14.1.
func checkCalls(t *testing.T, log string, counted int, drawn float64) {
	t.Helper()
	text, err := os.ReadFile(log)
	if err != nil {
		t.Fatal(err)
	}
	calls := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(calls) != 2 {
		t.Fatalf("there were %d calls, want one for the lead-in and one for the window:\n%s", len(calls), text)
	}
	for _, want := range []string{"bench serve --backend openai", "--base-url http://127.0.0.1:1 --endpoint /v1/completions", "--model some/model --served-model-name served",
		"--custom-output-len -1", "--disable-shuffle", "--ignore-eos", "--save-detailed", "--num-prompts " + strconv.Itoa(counted)} {
		if !strings.Contains(calls[1], want) {
			t.Errorf("the call\n%s\nlacks %s", calls[1], want)
		}
	}
	if strings.Contains(string(text), "sk-secret") {
		t.Errorf("the key is on the command line, where all users of the machine see it")
	}
	fields := strings.Fields(calls[1])
	if rate, err := strconv.ParseFloat(fields[slices.Index(fields, "--request-rate")+1], 64); err != nil || math.Abs(rate/drawn-1) > 0.1 {
		t.Errorf("the rate is %g, %v; want about %g", rate, err, drawn)
	}
}

func TestLoadFailures(t *testing.T) {
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: time.Second}}}
	for _, row := range []struct {
		failure, wantText string // the error or the verdict's reason must contain wantText
		err               bool
	}{
		{"crash", "ValueError: tokenizer not found", true},
		{"pandas", "exit status 1; Python packages are missing, install them with pip install 'vllm[bench]'", true},
		{"nothing", "ended with exit code 0 but wrote no result", true},
		{"garbage", "read the result of ", true},
		{"short", "wrote a result of 1 request", true},
		{"failed", "no request was completed", false},
		{"some", "requests failed; at most 0 % may", false},
		{"cut", "no request was completed", false},
		{"hang", "no request was completed", false},
	} {
		load, plan := fakeLoad(t, row.failure), textPlan(t)
		plan.LeadIn = 0
		if row.failure == "hang" {
			load.Limit = 300 * time.Millisecond
		}
		run, err := load.Run(t.Context(), plan.Schedule(), nil)
		n, _ := plan.Counted()
		switch {
		case row.err && (err == nil || !strings.Contains(err.Error(), row.wantText)):
			t.Errorf("%s: %v, want an error with %q", row.failure, err, row.wantText)
		case !row.err && err != nil:
			t.Errorf("%s: %v, want samples that failed", row.failure, err)
		case !row.err:
			if v := limits.Judge(run.Samples, n, run.Elapsed); v.Pass || !strings.Contains(v.Reason, row.wantText) {
				t.Errorf("%s: %+v, want a failed verdict with %q", row.failure, v, row.wantText)
			}
		}
	}
}

func TestLoadEndsWithItsContext(t *testing.T) {
	died := errors.New("the server died")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(300*time.Millisecond, func() { cancel(died) })
	_, err := fakeLoad(t, "hang").Run(ctx, textPlan(t).Schedule(), nil)
	if !errors.Is(err, died) { // without the end of the context, the program would hang for longer than the test may take
		t.Errorf("Run = %v, want the cause", err)
	}
}

func TestLoadRefusesWhatItCannotSay(t *testing.T) {
	load := fakeLoad(t, "good")
	chat := &workload.Request{OutputTokens: 1, Messages: []workload.Message{{Role: "system", Content: "a"}, {Role: "user", Content: "b"}}}
	for _, row := range []struct {
		name     string
		request  *workload.Request
		wantText string
	}{
		{"a chat of several messages", chat, "request 1 of the window: it is a chat of several messages"},
		{"token ids without a server", &workload.Request{OutputTokens: 1, Tokens: []int32{1, 2}}, "turn token ids into text: http://127.0.0.1:1 cannot be reached"},
	} {
		_, err := load.Run(t.Context(), func(yield func(workload.Arrival) bool) {
			yield(workload.Arrival{Phase: workload.Window, Request: row.request})
		}, nil)
		if err == nil || !strings.Contains(err.Error(), row.wantText) {
			t.Errorf("%s: %v, want %q", row.name, err, row.wantText)
		}
	}
}
