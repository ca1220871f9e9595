package main

import (
	"bufio"
	"context"
	"encoding/json"
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
	"vllmtuner/trial/slo"
)

// fakeVLLM is a vllm whose bench serve sends nothing and writes what FAKE_VLLM says, in the layout of 0.14.1.
func fakeVLLM() {
	how := os.Getenv("FAKE_VLLM")
	fmt.Println("Namespace(backend='openai')")
	option := func(name string) string {
		at := slices.Index(os.Args, name)
		if at < 0 || at+1 == len(os.Args) {
			fmt.Fprintln(os.Stderr, "error: missing", name)
			os.Exit(2)
		}
		return os.Args[at+1]
	}
	if log := os.Getenv("FAKE_VLLM_ARGS"); log != "" {
		f, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err == nil {
			fmt.Fprintln(f, strings.Join(os.Args[1:], " "))
			f.Close()
		}
	}
	result := filepath.Join(option("--result-dir"), option("--result-filename"))
	text := fakeResult(option("--dataset-path"), how)
	switch how {
	case "crash":
		fmt.Fprintln(os.Stderr, "Traceback (most recent call last):\nValueError: tokenizer not found")
		os.Exit(1)
	case "pandas":
		fmt.Fprintln(os.Stderr, "ModuleNotFoundError: No module named 'pandas'")
		os.Exit(1)
	case "hang":
		time.Sleep(time.Hour)
	case "nothing":
		return
	case "garbage":
		text = "{\"completed\": oops"
	}
	if err := os.WriteFile(result, []byte(text), 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// fakeResult answers each row with a TTFT of 50 ms and a TPOT of 10 ms.
func fakeResult(data, how string) string {
	var inputs, outputs []int
	var ttfts []float64
	var itls [][]float64
	var problems []string
	f, err := os.Open(data)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	in := bufio.NewScanner(f)
	for i := 0; in.Scan(); i++ {
		var row struct {
			Prompt string `json:"prompt"`
			Tokens int    `json:"output_tokens"`
		}
		if err := json.Unmarshal(in.Bytes(), &row); err != nil || row.Prompt == "" || how == "short" && i > 0 {
			continue
		}
		problem := ""
		if how == "failed" || how == "some" && i%10 == 0 {
			problem = "Service Unavailable"
		}
		inputs, problems = append(inputs, len(strings.Fields(row.Prompt))), append(problems, problem)
		if problem != "" {
			outputs, ttfts, itls = append(outputs, 0), append(ttfts, 0), append(itls, []float64{})
			continue
		}
		if how == "cut" {
			row.Tokens--
		}
		outputs, ttfts, itls = append(outputs, row.Tokens), append(ttfts, 0.05), append(itls, slices.Repeat([]float64{0.01}, row.Tokens-1))
	}
	n, failed := len(inputs), 0
	for _, p := range problems {
		failed += min(1, len(p))
	}
	result := map[string]any{
		"date": "20260101-000000", "backend": "openai", "endpoint_type": "openai", "label": nil, "model_id": "m", "tokenizer_id": "m",
		"num_prompts": n, "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": nil, "duration": 3.0, "completed": n - failed,
		"failed": failed, "total_input_tokens": 8 * n, "total_output_tokens": 8 * (n - failed), "request_throughput": 2.0, "request_goodput": nil,
		"output_throughput": 16.0, "total_token_throughput": 32.0, "max_output_tokens_per_s": 20.0, "max_concurrent_requests": 3,
		"input_lens": inputs, "output_lens": outputs, "ttfts": ttfts, "itls": itls, "errors": problems, "generated_texts": make([]string, n),
	}
	for _, metric := range []string{"ttft", "tpot", "itl", "e2el"} {
		for _, name := range []string{"mean_%s_ms", "median_%s_ms", "std_%s_ms", "p50_%s_ms", "p90_%s_ms", "p95_%s_ms", "p99_%s_ms", "p99.9_%s_ms"} {
			result[fmt.Sprintf(name, metric)] = 0.0
		}
	}
	text, err := json.Marshal(result)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// fakeLoad is the driver with the fake command.
func fakeLoad(t *testing.T, how string) *vllmBench {
	return &vllmBench{
		command: []string{"fake-vllm", "bench", "serve"}, env: []string{"FAKE_VLLM=" + how}, dir: t.TempDir(), tokenizer: "some/model",
		client: &bench.Client{URL: "http://127.0.0.1:1", Model: "served", APIKey: "sk-secret"},
	}
}

// textPlan is one probe of a workload of texts.
func textPlan(t *testing.T) workload.Plan {
	t.Helper()
	path := filepath.Join(t.TempDir(), "data.jsonl")
	var rows strings.Builder
	for i := range 20 {
		fmt.Fprintf(&rows, `{"prompt": "tell me of \"%d\"", "output_tokens": %d}`+"\n", i, 5+i)
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

func TestVLLMBenchGivesTheSameKindOfProbe(t *testing.T) {
	log := filepath.Join(t.TempDir(), "args")
	load, plan := fakeLoad(t, "good"), textPlan(t)
	load.env = append(load.env, "FAKE_VLLM_ARGS="+log)
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
	if left, _ := filepath.Glob(filepath.Join(load.dir, "*")); len(left) > 0 {
		t.Errorf("%v are left behind", left)
	}
}

// checkCalls holds the two command lines, of lead-in and window, against what vLLM 0.14.1 takes.
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

func TestVLLMBenchFailures(t *testing.T) {
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: time.Second}}}
	for _, row := range []struct {
		how, says string // of the error, or else of the verdict
		err       bool
	}{
		{"crash", "ValueError: tokenizer not found", true},
		{"pandas", "exit status 1 for lack of a package; install them with pip install 'vllm[bench]'", true},
		{"nothing", "ended well and wrote no result", true},
		{"garbage", "read the result of fake-vllm bench serve", true},
		{"short", "wrote a result of 1 requests", true},
		{"failed", "no request was completed", false},
		{"some", "requests failed, 0 % may", false},
		{"cut", "no request was completed", false},
		{"hang", "no request was completed", false},
	} {
		load, plan := fakeLoad(t, row.how), textPlan(t)
		plan.LeadIn = 0
		if row.how == "hang" {
			load.limit = 300 * time.Millisecond
		}
		run, err := load.Run(t.Context(), plan.Schedule(), nil)
		n, _ := plan.Counted()
		switch {
		case row.err && (err == nil || !strings.Contains(err.Error(), row.says)):
			t.Errorf("%s: %v, want an error with %q", row.how, err, row.says)
		case !row.err && err != nil:
			t.Errorf("%s: %v, want samples that failed", row.how, err)
		case !row.err:
			if v := limits.Judge(run.Samples, n, run.Elapsed); v.Pass || !strings.Contains(v.Reason, row.says) {
				t.Errorf("%s: %+v, want a failed verdict with %q", row.how, v, row.says)
			}
		}
	}
}

func TestVLLMBenchEndsWithItsContext(t *testing.T) {
	died := errors.New("the server died")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(300*time.Millisecond, func() { cancel(died) })
	start := time.Now()
	_, err := fakeLoad(t, "hang").Run(ctx, textPlan(t).Schedule(), nil)
	if !errors.Is(err, died) || time.Since(start) > 10*time.Second {
		t.Errorf("after %s: %v, want the cause at once", time.Since(start), err)
	}
}

func TestVLLMBenchRefusesWhatItCannotSay(t *testing.T) {
	load := fakeLoad(t, "good")
	chat := &workload.Request{OutputTokens: 1, Messages: []workload.Message{{Role: "system", Content: "a"}, {Role: "user", Content: "b"}}}
	for _, row := range []struct {
		name    string
		request *workload.Request
		says    string
	}{
		{"a chat of several messages", chat, "request 1 of the window: is a chat of several messages"},
		{"token ids without a server", &workload.Request{OutputTokens: 1, Tokens: []int32{1, 2}}, "turn token ids into text: http://127.0.0.1:1 cannot be reached"},
	} {
		_, err := load.Run(t.Context(), func(yield func(workload.Arrival) bool) {
			yield(workload.Arrival{Phase: workload.Window, Request: row.request})
		}, nil)
		if err == nil || !strings.Contains(err.Error(), row.says) {
			t.Errorf("%s: %v, want %q", row.name, err, row.says)
		}
	}
}
