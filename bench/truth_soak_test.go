package bench_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"vllmtuner/bench/truth"
)

// The command `make soak-bench` sets these environment variables. Without BENCH_SOAK the test sends only 4,000
// requests.
const (
	soakVariable     = "BENCH_SOAK"      // number of requests
	soakFileVariable = "BENCH_SOAK_FILE" // file for the figures
)

// maxResident is the limit on a client's memory in bytes, however long it runs.
const maxResident = 256 << 20

// TestSoak sends many short requests as fast as the machine can, and checks the memory of the client's process.
func TestSoak(t *testing.T) {
	requests := 4000
	if text := os.Getenv(soakVariable); text != "" {
		var err error
		if requests, err = strconv.Atoi(text); err != nil || requests < 1 {
			t.Fatalf("%s=%s: want a number of requests", soakVariable, text)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Duration(requests)*time.Millisecond)
	defer cancel()
	url, stop := startTruth(t, truth.Config{TTFT: 0, TPOT: time.Millisecond, Forget: true})
	defer stop()
	began := time.Now()
	l := load{URL: url, InFlight: 64, Requests: requests, Tokens: 2, MaxSamples: min(10_000, requests/4)}
	highest, early := 0, 0
	o, c, err := runClient(ctx, t, l, func(resident int) {
		if highest = max(highest, resident); time.Since(began) < 30*time.Second {
			early = highest
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	took, m := time.Since(began), o.Measurement
	if m.Requests != requests || m.Completed != requests || m.Failed != 0 {
		t.Errorf("%d of %d requests completed and %d failed (%v), want all and none", m.Completed, m.Requests, m.Failed, m.Failures)
	}
	if m.Exact {
		t.Error("the percentiles are exact, so no Tally has replaced the samples")
	}
	if c.memory > maxResident || c.memory == 0 {
		t.Errorf("the client took %d MiB, want at most %d", c.memory>>20, maxResident>>20)
	}
	line := fmt.Sprintf("%d requests of 2 tokens, 64 in flight, in %s: %.0f requests/s, %.1f µs of CPU time a request; resident memory %d MiB at most, %d MiB in the first 30 s",
		requests, took.Round(time.Second), float64(requests)/took.Seconds(), perToken(c.cpu, requests), c.memory>>20, early>>20)
	t.Log(line)
	if file := os.Getenv(soakFileVariable); file != "" {
		text := fmt.Sprintf("# Many requests in little memory\n\nRead here how much memory and CPU time the load generator needs for a run of many millions of requests.\n\nWritten by `make soak-bench`. Commit %s, %s, %s.\n\n%s.\n", commit(), time.Now().Format(time.DateOnly), machine(), line)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
