package simload

import (
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
)

// A loadedServer is a simulated server and its load, whose windows the tests compare.
type loadedServer struct {
	name, profile, args string
	input, output       int     // mean tokens; lengths vary by 90 % around them
	saturation          float64 // the most requests per second that it can serve
}

var loadedServers = []loadedServer{
	{"h200", "h200-llama70b-fp8", "--max-model-len 16384", 1000, 250, 6.9},
	{"l4", "l4-qwen0.5b", "", 600, 150, 29},
	{"16 seqs", "small-fast", "--max-num-seqs 16", 400, 200, 9.7},
}

// loose has limits that every window keeps, so that only a growing queue fails.
var loose = slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: 10 * time.Hour}, {Metric: slo.TPOT, Percentile: 99, Max: time.Hour}, {Metric: slo.E2E, Percentile: 95, Max: 10 * time.Hour}}}

// windows judges independent windows of two minutes at a rate. With stop, a window may end early.
func (q loadedServer) windows(tb testing.TB, rate float64, draws int, stop bool) []slo.Verdict {
	tb.Helper()
	p, err := sim.LoadProfile(q.profile)
	if err != nil {
		tb.Fatal(err)
	}
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: q.input, OutputTokens: q.output, RangeRatio: 0.9}, 1)
	if err != nil {
		tb.Fatal(err)
	}
	verdicts := make([]slo.Verdict, draws)
	const workers = 2
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			rig := &Rig{Profile: p}
			for draw := worker; draw < draws; draw += workers {
				_, load, err := rig.Start(tb.Context(), trial.Launch{Number: draw, Args: strings.Fields(q.args)})
				if err != nil {
					tb.Error(err)
					return
				}
				plan := workload.Plan{Source: source, Seed: 1, Rate: rate, LeadIn: 30 * time.Second, Window: 120 * time.Second, MinRequests: 300, Draw: draw}
				n, _ := plan.Counted()
				var early bench.Stop
				if stop {
					early = loose.Stop(n)
				}
				run, err := load.Run(tb.Context(), plan.Schedule(), early)
				if err != nil {
					tb.Error(err)
					return
				}
				verdicts[draw] = loose.Judge(run.Samples, n, run.Elapsed)
			}
		})
	}
	all.Wait()
	return verdicts
}

// errorRatios returns, for each limit of loose, the standard errors of the windows divided by the true spread between the windows.
// independent is the same for standard errors that take the requests for independent.
func errorRatios(windows []slo.Verdict) (clustered, independent [3]float64) {
	n := float64(len(windows))
	for i := range clustered {
		var sum, squares, errors, independents float64
		for _, v := range windows {
			c := v.Checks[i]
			sum += math.Log(c.ValueMS)
			squares += math.Log(c.ValueMS) * math.Log(c.ValueMS)
			errors += c.HeadroomSE * c.HeadroomSE
			independents += c.HeadroomSE * c.HeadroomSE * c.EffectiveN / float64(c.N)
		}
		truth := squares/n - sum/n*sum/n
		clustered[i], independent[i] = math.Sqrt(errors/n/truth), math.Sqrt(independents/n/truth)
	}
	return clustered, independent
}

// saturated counts the windows that fail because their queue grows.
func saturated(windows []slo.Verdict) (n int) {
	for _, v := range windows {
		if v.Binding == "over-saturated" {
			n++
		}
	}
	return n
}

// The requests of one window are not independent: standard errors under that assumption are too small by a factor of two or more.
// Close to saturation the bursts last longer than the blocks of a window, and our standard errors are somewhat too small too.
func TestTheErrorOfHeadroomIsThatBetweenWindows(t *testing.T) {
	realtime.Only(t, "simulates 80 windows")
	for _, q := range []loadedServer{loadedServers[0], loadedServers[2]} {
		windows := q.windows(t, 0.75*q.saturation, 40, false)
		clustered, independent := errorRatios(windows)
		for i, c := range windows[0].Checks {
			if clustered[i] < 0.45 || clustered[i] > 1.5 || independent[i] > 0.8*clustered[i] {
				t.Errorf("%s, %s: the standard error is %.2f of the spread between windows, and %.2f for independent requests", q.name, c.Limit, clustered[i], independent[i])
			}
		}
	}
}

func TestAQueueGrowsOnlyAboveSaturation(t *testing.T) {
	realtime.Only(t, "simulates 120 windows")
	for _, q := range []loadedServer{loadedServers[0], loadedServers[2]} {
		for _, row := range []struct {
			part     float64 // of the saturation
			min, max int     // of ten windows
		}{{0.9, 0, 0}, {1.2, 9, 10}, {1.5, 10, 10}} {
			for _, stop := range []bool{false, true} {
				if n := saturated(q.windows(t, row.part*q.saturation, 10, stop)); n < row.min || n > row.max {
					t.Errorf("%s at %g of its saturation, stop %v: the queue grows in %d of 10 windows, want %d to %d", q.name, row.part, stop, n, row.min, row.max)
				}
			}
		}
	}
}

// BenchmarkWindows prints the figures of docs/measurement.md with -v.
func BenchmarkWindows(b *testing.B) {
	for b.Loop() {
		for _, q := range loadedServers {
			for _, part := range []float64{0.7, 0.9, 0.95, 1.05, 1.1, 1.2, 1.5} {
				draws := 200
				if part > 1 {
					draws = 30
				}
				whole := q.windows(b, part*q.saturation, draws, false)
				clustered, independent := errorRatios(whole)
				early := saturated(q.windows(b, part*q.saturation, draws, true))
				b.Logf("%s at %g: errors %.2f, for independent requests %.2f; the queue grows in %d of %d windows, and in %d that may end early",
					q.name, part, clustered, independent, saturated(whole), draws, early)
			}
		}
	}
}
