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
		{"--no-such-flag", serverctl.FlagsRejected, 2}, // argparse exits with 2
		{"--max-num-seqs 64 --max-num-batched-tokens 32", serverctl.FlagsRejected, 1},
		{"--gpu-memory-utilization 0.5", serverctl.KVTooSmall, 1},
		{"--gpu-memory-utilization 0.99", serverctl.OOMStart, 1},
	} {
		_, _, err := rig(t).Start(t.Context(), trial.Launch{Args: strings.Fields(row.args), Progress: func(string) {}})
		exit, ok := errors.AsType[*serverctl.ExitError](err)
		if !ok || exit.Class != row.class || exit.Code != row.code || exit.Evidence == "" || exit.Argparse != (row.code == 2) {
			t.Errorf("%s: Start = %v, want class %s and code %d", row.args, err, row.class, row.code)
		}
	}
}

// closed runs a closed loop on a new server.
func closed(t *testing.T, args string, streams, requests int) (bench.Run, trial.Server) {
	t.Helper()
	server, load := start(t, rig(t), args)
	loop := workload.Loop{Source: source(t, workload.Spec{Kind: "random", InputTokens: 100, OutputTokens: 20}, 1), N: requests}
	run, err := load.(trial.ClosedLoad).RunClosed(t.Context(), workload.WithoutRunOut(loop.Schedule()), streams, nil)
	if err != nil || len(run.Samples) != requests {
		t.Fatalf("RunClosed gives %d samples, %v; want %d", len(run.Samples), err, requests)
	}
	return run, server
}

// inFlight returns how many requests are in flight at the given time.
func inFlight(run bench.Run, at time.Duration) (n int) {
	for _, s := range run.Samples {
		if s.Due <= at && at < s.End {
			n++
		}
	}
	return n
}

func TestAClosedLoopKeepsItsStreamsBusy(t *testing.T) {
	for _, streams := range []int{1, 3, 16} {
		run, server := closed(t, "", streams, 60)
		for i, s := range run.Samples {
			if !s.OK() || s.Sent != s.Due || s.Index != i || s.TTFT() <= 0 || s.OutputTokens != 20 {
				t.Fatalf("%d streams: sample %d is %+v", streams, i, s)
			}
			if n := inFlight(run, s.Due); i >= streams && i < 60-streams && n != streams || n > streams {
				t.Errorf("%d streams: %d requests are in flight when request %d is sent", streams, n, i)
			}
			if i < streams && s.Due != 0 {
				t.Errorf("%d streams: request %d is sent at %s, want at once", streams, i, s.Due)
			}
		}
		if _, err := server.Drain(t.Context()); err != nil {
			t.Errorf("%d streams: %v", streams, err)
		}
	}
}

// A stream becomes idle when its client has the whole answer. The engine has finished the answer a little earlier. An
// idle stream sends its next request at once.
func TestAStreamSendsAgainAtOnce(t *testing.T) {
	run, _ := closed(t, "", 1, 5)
	for i := 1; i < 5; i++ {
		if gap := run.Samples[i].Due - run.Samples[i-1].End; math.Abs(float64(gap)) > float64(time.Microsecond) {
			t.Errorf("request %d is sent %s after the end of the previous answer, want at once", i, gap)
		}
	}
}

func TestMoreStreamsServeMore(t *testing.T) {
	last := time.Duration(math.MaxInt64)
	for _, streams := range []int{1, 2, 4, 8} {
		run, _ := closed(t, "", streams, 64)
		if run.Elapsed >= last {
			t.Errorf("64 requests in %d streams take %s, want less than the %s in half as many streams", streams, run.Elapsed, last)
		}
		last = run.Elapsed
	}
}

func TestRefusedRequestsFreeTheirStreams(t *testing.T) {
	run, _ := closed(t, "--max-model-len 110", 2, 10)
	for i, s := range run.Samples {
		if s.Failure != bench.Status {
			t.Errorf("request %d of 120 tokens gives %+v, want status 400", i, s)
		}
	}
}
