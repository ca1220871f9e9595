package simload

import (
	"context"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl/sim"
	"vllmtuner/serverctl/sim/vllm"
	"vllmtuner/trial"
)

// httpURL starts a simulated server in real time. It returns the server's URL once the server answers.
func httpURL(t *testing.T, p *sim.Profile) string {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	_, port, _ := net.SplitHostPort(address)
	free.Close()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- (&vllm.Server{Profile: p, Out: io.Discard}).Serve(ctx, []string{"m", "--port", port}) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v", err)
		}
	})
	url := "http://" + address
	for begin := time.Now(); time.Since(begin) < 45*time.Second; {
		if resp, err := http.Get(url + "/health"); err == nil {
			resp.Body.Close()
			return url
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatal("the server is not ready after 45 s")
	return ""
}

// The p99 TTFT and the p99 TPOT are the same within 2 % over HTTP in real time and from the engine in virtual time.
// Both get the same light load. A busy machine delays some runs. So two runs in which both agree are enough, and the test
// fails after nine runs. On a quiet machine, and even beside four busy loops, runs differ by at most 1 %.
func TestHTTPAgreesWithVirtualTime(t *testing.T) {
	realtime.Only(t, "holds real time against virtual time")
	const maxError = 0.02
	p := profile(t, "h200-llama70b-fp8")
	p.StartUp = sim.StartUp{}
	client := &bench.Client{URL: httpURL(t, p), Model: "m"}
	agree := 0
	for seed := range uint64(9) {
		requests := source(t, workload.Spec{Kind: "random", InputTokens: 3000, OutputTokens: 20}, seed)
		plan := workload.Plan{Source: requests, Seed: seed, Rate: 1.2, LeadIn: time.Second, Window: 9 * time.Second, MinRequests: 6}
		_, virtual, err := (&Rig{Profile: p}).Start(t.Context(), trial.Launch{Progress: func(string) {}})
		if err != nil {
			t.Fatal(err)
		}
		var said [2]bench.Measurement
		for i, load := range []trial.Load{virtual, client} {
			run, err := load.Run(t.Context(), plan.Schedule(), nil)
			if err != nil {
				t.Fatal(err)
			}
			said[i] = bench.Measure(run, bench.Scope{})
			if said[i].Completed != len(run.Samples) || said[i].Completed < 6 {
				t.Fatalf("%d of %d requests were completed, want all of at least 6", said[i].Completed, len(run.Samples))
			}
		}
		off := func(of func(bench.Measurement) float64) float64 { return math.Abs(of(said[1])/of(said[0]) - 1) }
		ttft, tpot := off(func(m bench.Measurement) float64 { return m.TTFT.P99 }), off(func(m bench.Measurement) float64 { return m.TPOT.P99 })
		t.Logf("%d requests: p99 TTFT %.1f ms in virtual time, %.1f over HTTP; p99 TPOT %.2f and %.2f",
			said[0].Completed, said[0].TTFT.P99, said[1].TTFT.P99, said[0].TPOT.P99, said[1].TPOT.P99)
		if ttft <= maxError && tpot <= maxError {
			agree++
		}
		if agree == 2 {
			return
		}
	}
	t.Errorf("in %d of nine runs are p99 TTFT and p99 TPOT over HTTP within %.0f %% of virtual time, want two", agree, 100*maxError)
}

func median(values []float64) float64 {
	return bench.Percentile(slices.Sorted(slices.Values(values)), 50)
}
