package simload

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
)

func profile(tb testing.TB, name string) *sim.Profile {
	tb.Helper()
	p, err := sim.LoadProfile(name)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func source(tb testing.TB, spec workload.Spec, seed uint64) workload.Source {
	tb.Helper()
	s, err := workload.Open(spec, seed)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func rig(t *testing.T) *Rig { return &Rig{Profile: profile(t, "small-fast"), ITL: true} }

func start(t *testing.T, r *Rig, args string) (trial.Server, trial.Load) {
	t.Helper()
	server, load, err := r.Start(t.Context(), trial.Launch{Args: strings.Fields(args), Progress: func(string) {}})
	if err != nil {
		t.Fatal(err)
	}
	return server, load
}

func plan(t *testing.T, rate float64, output int) workload.Plan {
	t.Helper()
	requests := source(t, workload.Spec{Kind: "random", InputTokens: 100, OutputTokens: output, Requests: 50}, 1)
	return workload.Plan{Source: requests, Seed: 1, Rate: rate, LeadIn: time.Second, Window: 5 * time.Second, MinRequests: 40}
}

func TestRunCountsTheWindowAlone(t *testing.T) {
	server, load := start(t, rig(t), "")
	p := plan(t, 10, 20)
	n, _ := p.Counted()
	run, err := load.Run(t.Context(), p.Schedule(), nil)
	if err != nil || len(run.Samples) != n || run.Others == 0 || run.Stopped {
		t.Fatalf("Run gives %d samples and %d others, %v; want %d samples and some others", len(run.Samples), run.Others, err, n)
	}
	for i, s := range run.Samples {
		if s.Index != i || !s.OK() || s.OutputTokens != 20 || len(s.Gaps) != 19 || s.Due < p.LeadIn || s.TTFT() <= 0 {
			t.Fatalf("sample %d is %+v", i, s)
		}
		sum := time.Duration(0)
		for _, gap := range s.Gaps {
			sum += gap
		}
		if math.Abs(float64(sum-(s.Last-s.First))) > float64(time.Microsecond) {
			t.Fatalf("the gaps of sample %d sum to %s, its tokens took %s", i, sum, s.Last-s.First)
		}
	}
	if c, err := server.Counters(t.Context()); err != nil || c.Running+c.Waiting+c.KVUsage != 0 || c.GenerationTokens == 0 {
		t.Errorf("after a run the counters are %+v, %v, want an idle server", c, err)
	}
}

func TestRunEndsEarly(t *testing.T) {
	server, load := start(t, rig(t), "--max-num-seqs 1")
	stopAt := 3 * time.Second
	run, err := load.Run(t.Context(), plan(t, 50, 100).Schedule(), func(now time.Duration, counted []bench.Sample) bool { return now >= stopAt })
	if err != nil || !run.Stopped || run.Elapsed < stopAt || run.Elapsed > stopAt+2*time.Second {
		t.Errorf("Run = stopped %v after %s, %v; want true after 3 to 5 s", run.Stopped, run.Elapsed, err)
	}
	if _, err := server.Drain(t.Context()); err != nil {
		t.Errorf("a stopped run leaves requests behind: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if _, err := load.Run(ctx, plan(t, 10, 20).Schedule(), nil); !errors.Is(err, cause) {
		t.Errorf("Run under an ended context = %v, want its cause", err)
	}
}

func TestRequestsLongerThanTheModelFail(t *testing.T) {
	_, load := start(t, rig(t), "--max-model-len 110")
	run, err := load.Run(t.Context(), plan(t, 10, 20).Schedule(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if s := run.Samples[0]; s.Failure != bench.Status || !strings.Contains(s.Detail, "maximum context length is 110") {
		t.Errorf("a request of 120 tokens gives %+v, want status 400", s)
	}
}

func TestStartRefusesAsTheServerWould(t *testing.T) {
	for _, row := range []struct {
		args  string
		class serverctl.Class
		code  int
	}{
		{"--no-such-flag", serverctl.FlagsRejected, 2},
		{"--max-num-seqs 64 --max-num-batched-tokens 32", serverctl.FlagsRejected, 1},
		{"--gpu-memory-utilization 0.5", serverctl.KVTooSmall, 1},
		{"--gpu-memory-utilization 0.99", serverctl.OOMStart, 1},
	} {
		_, _, err := rig(t).Start(t.Context(), trial.Launch{Args: strings.Fields(row.args), Progress: func(string) {}})
		exit, ok := errors.AsType[*serverctl.ExitError](err)
		if !ok || exit.Class != row.class || exit.Code != row.code || exit.Evidence == "" {
			t.Errorf("%s: Start = %v, want class %s and code %d", row.args, err, row.class, row.code)
		}
	}
}
