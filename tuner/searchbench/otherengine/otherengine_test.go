package otherengine

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// small is a machine. With the default flags its KV cache holds 0.9 · 60,000 - 30,000 - 20 · 64 - 2 · 2048 = 18,624
// tokens.
var small = Machine{
	Name: "small", Memory: 60_000, Weights: 30_000, PerSeq: 20, PerBatch: 2, OOMUtil: 1, OOMSeqs: 1e-4, OOMBatch: 1e-5,
	Decode: 3000, Half: 40, Prefill: 20_000, Chunk: 1500, Share: 6000, Seqs: 64, Batch: 2048, MaxModelLen: 4096,
	StartUp: time.Minute, Stop: 5 * time.Second,
}

func source(t *testing.T, spec workload.Spec) workload.Source {
	t.Helper()
	s, err := workload.Open(spec, 1)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func start(t *testing.T, m Machine, args ...string) (trial.Server, trial.Load) {
	t.Helper()
	server, l, err := m.Start(t.Context(), trial.Launch{Number: 1, Args: args})
	if err != nil {
		t.Fatal(err)
	}
	return server, l
}

// send sends n counted requests at a rate, in requests per second.
func send(t *testing.T, l trial.Load, s workload.Source, rate float64, n int) bench.Run {
	t.Helper()
	plan := workload.Plan{Source: s, Seed: 1, Rate: rate, MinRequests: n, Rescale: true}
	run, err := l.Run(t.Context(), plan.Schedule(), nil)
	if err != nil {
		t.Fatal(err)
	}
	return run
}

func chats(t *testing.T) workload.Source {
	return source(t, workload.Spec{Kind: "random", InputTokens: 800, OutputTokens: 200, RangeRatio: 0.8})
}

// Every request gets the wanted number of tokens. Evictions neither lose tokens nor count them twice.
func TestWorkIsConserved(t *testing.T) {
	up, l := start(t, small)
	run := send(t, l, chats(t), 40, 500)
	counters, err := up.Counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	wanted := 0.0
	for i, s := range run.Samples {
		if !s.OK() || s.OutputTokens != s.WantTokens || s.First < s.Due || s.Last < s.First {
			t.Fatalf("request %d: %+v", i, s)
		}
		wanted += float64(s.WantTokens)
	}
	decoded := counters.GenerationTokens + float64(len(run.Samples)) // the prefill gives the first token
	if math.Abs(decoded-wanted) > 0.01 {
		t.Errorf("%.3f tokens were generated, want %.0f", decoded, wanted)
	}
	if counters.Preemptions == 0 {
		t.Error("no sequence was evicted, but this test needs evictions")
	}
	if e := up.(*server).engine; !e.idle() || e.used != 0 {
		t.Errorf("the engine is not idle: %.3f tokens are held", e.used)
	}
}

// A single request takes as long as the equations say.
func TestASingleRequest(t *testing.T) {
	_, l := start(t, small)
	s := send(t, l, source(t, workload.Spec{Kind: "random", InputTokens: 1000, OutputTokens: 101}), 1, 1).Samples[0]
	prefill := 1000 / (small.Prefill * 2048 / (2048 + small.Chunk))
	decode := 100 / (small.Decode / (1 + small.Half))
	if got := s.TTFT().Seconds(); math.Abs(got-prefill) > 1e-6 {
		t.Errorf("TTFT %.6f s, want %.6f", got, prefill)
	}
	if got := (s.Last - s.First).Seconds(); math.Abs(got-decode) > 1e-6 {
		t.Errorf("decoding took %.6f s, want %.6f", got, decode)
	}
}

func TestTheSameSeedGivesTheSameRun(t *testing.T) {
	m := small
	m.PauseEvery, m.PauseLeast, m.PauseMost = 5, 0.2, 1
	once := func(number int) []bench.Sample {
		_, l, err := m.Start(t.Context(), trial.Launch{Number: number})
		if err != nil {
			t.Fatal(err)
		}
		return send(t, l, chats(t), 10, 200).Samples
	}
	same := func(a, b bench.Sample) bool { return a.First == b.First && a.Last == b.Last }
	if !slices.EqualFunc(once(1), once(1), same) {
		t.Error("two runs with one seed differ")
	}
	if slices.EqualFunc(once(1), once(2), same) {
		t.Error("two seeds have the same pauses")
	}
}

// More memory never makes the engine slower at a rate that fills the KV cache.
func TestMoreMemoryCarriesMore(t *testing.T) {
	last := math.Inf(1)
	for _, util := range []string{"0.68", "0.75", "0.85", "0.95"} {
		_, l := start(t, small, "--gpu-memory-utilization", util, "--max-num-seqs", "64")
		took := send(t, l, chats(t), 40, 500).Elapsed.Seconds()
		if took > last*1.001 {
			t.Errorf("500 requests take %.1f s with utilization %s, and %.1f s with less memory", took, util, last)
		}
		last = took
	}
}

func TestAStartRunsOutOfMemoryAboveAPlane(t *testing.T) {
	for _, row := range []struct {
		name         string
		util         float64
		seqs, tokens int
		class        serverctl.Class
	}{
		{"the default starts", 0.9, 64, 2048, ""},
		{"just below the plane it starts", 0.95, 490, 64, ""},
		{"more utilization is above it", 0.98, 64, 2048, serverctl.OOMStart},
		{"more sequences are above it", 0.9, 900, 2048, serverctl.OOMStart},
		{"more tokens are above it", 0.9, 64, 9800, serverctl.OOMStart},
		{"too little memory for one request", 0.6, 64, 2048, serverctl.KVTooSmall},
	} {
		args := []string{"--gpu-memory-utilization", fmt.Sprint(row.util), "--max-num-seqs", fmt.Sprint(row.seqs), "--max-num-batched-tokens", fmt.Sprint(row.tokens)}
		_, _, err := small.Start(t.Context(), trial.Launch{Args: args})
		exit, _ := errors.AsType[*serverctl.ExitError](err)
		switch {
		case row.class == "" && err != nil:
			t.Errorf("%s: %v", row.name, err)
		case row.class != "" && (exit == nil || exit.Class != row.class):
			t.Errorf("%s: %v, want %s", row.name, err, row.class)
		}
	}
}

// Pauses slow some requests down. The share of slow requests is about the same at a low rate and at a higher rate.
func TestPausesSlowAFewRequestsAtAnyRate(t *testing.T) {
	realtime.Only(t, "simulates 40,000 requests")
	m := small
	m.PauseEvery, m.PauseLeast, m.PauseMost, m.NoCache = 40, 0.2, 1, true
	for _, rate := range []float64{0.5, 2} {
		_, l := start(t, m)
		slow := 0
		for _, s := range send(t, l, chats(t), rate, 20_000).Samples {
			if s.TTFT() > 400*time.Millisecond {
				slow++
			}
		}
		if share := float64(slow) / 20_000; share < 0.003 || share > 0.012 {
			t.Errorf("at %g req/s %.2f %% are slow", rate, 100*share)
		}
	}
}

// A prompt that was sent before takes much less time, until the cache is emptied.
func TestThePrefixCache(t *testing.T) {
	server, l := start(t, small)
	one := source(t, workload.Spec{Kind: "random", InputTokens: 3000, OutputTokens: 2, Requests: 1})
	first := func() float64 { return send(t, l, one, 1, 1).Samples[0].TTFT().Seconds() }
	cold, warm := first(), first()
	if warm > cold/5 {
		t.Errorf("TTFT is %.3f s cold and %.3f s cached", cold, warm)
	}
	if err := server.ResetCache(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := first(); math.Abs(again-cold) > 1e-6 {
		t.Errorf("TTFT is %.3f s after a reset, want %.3f", again, cold)
	}
}
