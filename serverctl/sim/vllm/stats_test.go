package vllm

import (
	"context"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"vllmtuner/serverctl/sim"
)

// scraped reads all samples of /metrics by name and labels.
func scraped(t *testing.T, url string) map[string]float64 {
	t.Helper()
	found := map[string]float64{}
	text := sendRecorded(t, url, recordedRequest{Method: "GET", Path: "/metrics"}).Body
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil && name[0] != '#' {
			found[strings.NewReplacer(`engine="0",`, "", `,model_name="m"`, "", `model_name="m"`, "").Replace(name)+"}"] = v
		}
	}
	return found
}

// The metrics agree with the known lengths of two requests, one of which has two answers.
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
	} {
		if got, ok := m[name]; !ok || got != want {
			t.Errorf("%s is %v (present: %v), want %v", name, got, ok, want)
		}
	}
	url, _ = serveAs(t, "0.14.1", "--served-model-name", "m", "--disable-log-stats")
	if m := scraped(t, url); len(m) != 0 {
		t.Errorf("with --disable-log-stats the metrics are %v, want none", m)
	}
}

// The answer to a preempted request is complete.
func TestAPreemptedRequestGetsAllItsTokens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := profile(t, "small-fast")
		o := p.Defaults
		o.MaxModelLen = 2000
		o.GPUMemoryUtilization = 0.58
		o.MaxNumBatchedTokens, o.MaxNumSeqs = 512, 16
		for tokens, err := p.KVTokens(o); err != nil || tokens > 3000; tokens, err = p.KVTokens(o) { // room for at most two of the requests below
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
			sequences = append(sequences, &sequence{request: &sim.Request{Prompt: 900, Output: 400, Salt: uint64(i + 1)}})
		}
		came := make([]int, len(sequences))
		updates := l.submit(sequences)
		for left := len(sequences); left > 0; {
			<-updates.ready
			for _, r := range updates.take(nil) {
				came[r.index] += r.tokens
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
		if engine.Totals.Preemptions == 0 || l.stats.generationTokens != 1200 {
			t.Errorf("%d preemptions, %d tokens; want some preemptions and 1200 tokens", engine.Totals.Preemptions, l.stats.generationTokens)
		}
	})
}

// The tokens of one step are one chunk of a stream, as with speculative decoding.
func TestTokensOfOneStepAreOneChunk(t *testing.T) {
	w := &recorder{}
	s := &answer{w: w, model: "m", sequences: []*sequence{{request: &sim.Request{Prompt: 2, Output: 5}}}, sent: make([]int, 1), usage: true, prompt: 2}
	if err := s.begin(true); err != nil {
		t.Fatal(err)
	}
	for _, n := range []progress{{tokens: 3}, {tokens: 2, last: true}} {
		if err := s.tokens(0, n); err != nil {
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
