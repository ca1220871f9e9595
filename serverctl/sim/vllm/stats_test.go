package vllm

import (
	"context"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"vllmtuner/serverctl/sim"
)

// commonLabels are the labels that nearly all samples have.
var commonLabels = regexp.MustCompile(`engine="0",|,?model_name="[^"]*"`)

// scraped returns the values of all samples of /metrics. A key is the name and the labels of a sample,
// without commonLabels.
func scraped(t *testing.T, url string) map[string]float64 {
	t.Helper()
	found := map[string]float64{}
	text := sendRecorded(t, url, recordedRequest{Method: "GET", Path: "/metrics"}).Body
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil && name[0] != '#' {
			found[commonLabels.ReplaceAllString(name, "")+"}"] = v
		}
	}
	return found
}

// The metrics agree with the known lengths of two requests. One request has two answers.
func TestMetricsAreTrue(t *testing.T) {
	url, _ := serveAs(t, "0.33.0", "--served-model-name", "m")
	for _, body := range []string{`{"prompt":[1,2,3,4,5],"max_tokens":4,"n":2}`, `{"prompt":[9,8,7],"max_tokens":1}`} {
		if status, text := post(t, url+"/v1/completions", body); status != 200 {
			t.Fatalf("%d %s", status, text)
		}
	}
	m := scraped(t, url)
	for name, want := range map[string]float64{
		"vllm:prompt_tokens_total{}": 13, "vllm:generation_tokens_total{}": 9, `vllm:request_success_total{finished_reason="length"}`: 3,
		"vllm:num_requests_running{}": 0, "vllm:prefix_cache_queries_total{}": 13,
		"vllm:request_prompt_tokens_sum{}": 13, "vllm:request_generation_tokens_sum{}": 9, "vllm:request_generation_tokens_count{}": 3,
		"vllm:request_params_max_tokens_sum{}": 9, "vllm:request_params_n_sum{}": 3, "vllm:request_params_n_count{}": 2,
		"vllm:request_max_num_generation_tokens_sum{}": 5, "vllm:request_prefill_kv_computed_tokens_sum{}": 13,
		"vllm:iteration_tokens_total_sum{}": 22, "vllm:time_to_first_token_seconds_count{}": 3, "vllm:inter_token_latency_seconds_count{}": 6,
		"vllm:request_time_per_output_token_seconds_count{}": 3, "vllm:request_num_preemptions_sum{}": 0,
		`vllm:request_generation_tokens_bucket{le="1.0"}`: 1, `vllm:request_generation_tokens_bucket{le="5.0"}`: 3,
	} {
		if got, ok := m[name]; !ok || got != want {
			t.Errorf("%s is %v (present: %v), want %v", name, got, ok, want)
		}
	}
	sum := func(name string) float64 { return m["vllm:"+name+"_sum{}"] }
	if a, b := sum("request_prefill_time_seconds")+sum("request_decode_time_seconds"), sum("request_inference_time_seconds"); math.Abs(a-b) > 1e-9 || b <= 0 {
		t.Errorf("prefill and decode take %v s, inference %v s; want the same", a, b)
	}
	if a, b := sum("inter_token_latency_seconds"), sum("request_decode_time_seconds"); math.Abs(a-b) > 1e-9 {
		t.Errorf("the times between tokens sum to %v s, decoding to %v s; want the same", a, b)
	}
	if ttft, e2e := sum("time_to_first_token_seconds"), sum("e2e_request_latency_seconds"); ttft < 0.02 || ttft >= e2e || e2e > 5 {
		t.Errorf("three first tokens took %v s, three answers %v s", ttft, e2e)
	}
	url, _ = serveAs(t, "0.14.1", "--served-model-name", "m", "--disable-log-stats")
	if m := scraped(t, url); len(m) != 0 {
		t.Errorf("with --disable-log-stats the metrics are %v, want none", m)
	}
}

// A preempted request counts once, and its answer is complete.
func TestPreemptionsAreCountedByRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := profile(t, "small-fast")
		o := p.Defaults
		o.MaxModelLen, o.Version = 2000, "0.33.0"
		o.GPUMemoryUtilization = 0.58
		o.MaxNumBatchedTokens, o.MaxNumSeqs = 512, 16
		// Reduce the memory until at most two of the requests below fit.
		for tokens, err := p.KVTokens(o); err != nil || tokens > 3000; tokens, err = p.KVTokens(o) {
			if err != nil {
				t.Fatal(err)
			}
			o.GPUMemoryUtilization -= 0.001
		}
		engine, err := sim.NewEngine(p, o)
		if err != nil {
			t.Fatal(err)
		}
		l := newLive(engine)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { l.run(ctx); close(done) }()
		var sequences []*sequence
		for i := range 3 {
			sequences = append(sequences, &sequence{request: &sim.Request{Prompt: 900, Output: 400, Salt: uint64(i + 1)}, group: &group{n: 3, left: 3}})
		}
		came := make([]int, len(sequences))
		updates := l.submit(sequences)
		for left := len(sequences); left > 0; {
			<-updates.ready
			for _, r := range updates.take(nil) {
				came[r.sequence.index] += r.tokens
				if r.last {
					left--
				}
			}
		}
		cancel()
		<-done
		if !slices.Equal(came, []int{400, 400, 400}) {
			t.Errorf("the answers have %v tokens", came)
		}
		if n := engine.Totals.Preemptions; n == 0 || l.stats.histograms["vllm:request_num_preemptions"].sum != float64(n) {
			t.Errorf("the engine preempted %d times, the histogram has %v", n, l.stats.histograms["vllm:request_num_preemptions"].sum)
		}
		if l.stats.histograms["vllm:request_queue_time_seconds"].sum <= 0 || l.stats.generationTokens != 1200 {
			t.Errorf("queued for %v s, %d tokens; want some time and 1200 tokens", l.stats.histograms["vllm:request_queue_time_seconds"].sum, l.stats.generationTokens)
		}
	})
}

// The tokens of one step are one chunk of a stream, as with speculative decoding.
func TestTokensOfOneStepAreOneChunk(t *testing.T) {
	w := &recorder{}
	s := &answer{w: w, shapes: allShapes()["0.14.1"], model: "m", sequences: []*sequence{{request: &sim.Request{Prompt: 2, Output: 5}}}, sent: make([]int, 1), usage: true, prompt: 2}
	if err := s.begin(true); err != nil {
		t.Fatal(err)
	}
	for _, u := range []update{{s.sequences[0], 3, false}, {s.sequences[0], 2, true}} {
		if err := s.tokens(u); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.end(); err != nil {
		t.Fatal(err)
	}
	chunks := strings.Split(strings.TrimSpace(w.String()), "\n\n")
	if len(chunks) != 4 || !strings.Contains(chunks[0], `"text":" w0 w1 w2"`) || !strings.Contains(chunks[1], `"text":" w3 w4"`) ||
		!strings.Contains(chunks[2], `"completion_tokens":5`) {
		t.Errorf("the chunks are %q", chunks)
	}
}

func TestPythonFloats(t *testing.T) {
	for x, want := range map[float64]string{0: "0.0", 1: "1.0", 0.005: "0.005", 2560: "2560.0", 1e-5: "1e-05", 1234567: "1.234567e+06", 1795204102.5: "1.7952041025e+09", math.Inf(1): "+Inf"} {
		if got := pythonFloat(x); got != want {
			t.Errorf("pythonFloat(%g) = %s, want %s", x, got, want)
		}
	}
}

// A recorder is a ResponseWriter that keeps the body.
type recorder struct{ strings.Builder }

func (r *recorder) Header() http.Header { return http.Header{} }
func (r *recorder) WriteHeader(int)     {}
func (r *recorder) Flush()              {}
