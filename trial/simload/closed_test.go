package simload

import (
	"math"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial"
)

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

// inFlight returns how many requests are in flight at a time.
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

// A stream becomes idle when its client has the whole answer, which is later than when the engine finished it. The stream then
// sends its next request at once.
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
