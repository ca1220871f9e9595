package simload

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
)

// A loadedServer is a simulated server with the load that it gets. The tests compare windows of that load.
type loadedServer struct {
	name, profile, args string
	input, output       int     // mean tokens; lengths vary by 90 % around the mean
	saturation          float64 // highest number of requests per second that the server can serve
}

var loadedServers = []loadedServer{
	{"h200", "h200-llama70b-fp8", "--max-model-len 16384", 1000, 250, 6.9},
	{"l4", "l4-qwen0.5b", "", 600, 150, 29},
	{"16 seqs", "small-fast", "--max-num-seqs 16", 400, 200, 9.7},
}

// loose has limits that no window breaks, so that a window fails only when its queue grows.
var loose = slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: 10 * time.Hour}, {Metric: slo.TPOT, Percentile: 99, Max: time.Hour}, {Metric: slo.E2E, Percentile: 95, Max: 10 * time.Hour}}}

// windows judges independent windows of two minutes at a rate. If stop is set, a window may end early.
func (q loadedServer) windows(tb testing.TB, rate float64, draws int, stop bool) []slo.Verdict {
	tb.Helper()
	requests := source(tb, workload.Spec{Kind: "random", InputTokens: q.input, OutputTokens: q.output, RangeRatio: 0.9}, 1)
	verdicts := make([]slo.Verdict, draws)
	rig := &Rig{Profile: profile(tb, q.profile)}
	err := inParallel(draws, func(draw int) error {
		_, load, err := rig.Start(tb.Context(), trial.Launch{Number: draw, Args: strings.Fields(q.args)})
		if err != nil {
			return err
		}
		plan := workload.Plan{Source: requests, Seed: 1, Rate: rate, LeadIn: 30 * time.Second, Window: 120 * time.Second, MinRequests: 300, Draw: draw}
		n, _ := plan.Counted()
		var early bench.Stop
		if stop {
			early = loose.Stop(n)
		}
		run, err := load.Run(tb.Context(), plan.Schedule(), early)
		verdicts[draw] = loose.Judge(run.Samples, n, run.Elapsed)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	return verdicts
}

// errorRatios returns, for each limit of loose, the standard error of a window divided by the true spread between
// windows. The result clustered uses our standard errors. The result independent uses standard errors that assume
// independent requests.
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

// Requests of one window depend on each other. So standard errors that assume independence are too small by a factor of
// two or more. Our standard errors are somewhat too small close to saturation, where bursts last longer than the blocks
// of a window.
func TestTheErrorOfHeadroomIsTheSpreadOfWindows(t *testing.T) {
	realtime.Only(t, "simulates 80 windows")
	for _, q := range []loadedServer{loadedServers[0], loadedServers[2]} {
		windows := q.windows(t, 0.75*q.saturation, 40, false)
		clustered, independent := errorRatios(windows)
		for i, c := range windows[0].Checks {
			if clustered[i] < 0.45 || clustered[i] > 1.5 || independent[i] > 0.8*clustered[i] {
				t.Errorf("%s, %s: the standard error is %.2f of the spread between windows, and %.2f of it assuming independence; want 0.45 to 1.5, and the second at most 0.8 of the first",
					q.name, c.Limit, clustered[i], independent[i])
			}
		}
	}
}

func TestAQueueGrowsOnlyAboveSaturation(t *testing.T) {
	realtime.Only(t, "simulates 120 windows")
	for _, q := range []loadedServer{loadedServers[0], loadedServers[2]} {
		for _, row := range []struct {
			part     float64 // rate divided by the saturation
			min, max int     // how many of ten windows have a growing queue
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
				b.Logf("%s at %g: errors %.2f, assuming independence %.2f; the queue grows in %d of %d windows, and in %d when windows may end early",
					q.name, part, clustered, independent, saturated(whole), draws, early)
			}
		}
	}
}

// capacityOf finds the capacity of a simulated H200 to 1 %, by bisection. Answers have 1000 tokens on average, as in
// production. The function changeEnd may cut off the end of each schedule.
func capacityOf(tb testing.TB, p *sim.Profile, seed uint64, changeEnd func(workload.Schedule) workload.Schedule) float64 {
	tb.Helper()
	requests := source(tb, workload.Spec{Kind: "random", InputTokens: 1500, OutputTokens: 1000}, seed)
	limits := limits(2000, 60)
	rig := &Rig{Profile: p}
	pass := func(rate float64) bool {
		_, load, err := rig.Start(tb.Context(), trial.Launch{Args: strings.Fields("--max-model-len 16384 --max-num-seqs 512")})
		if err != nil {
			tb.Fatal(err)
		}
		plan := workload.Plan{Source: requests, Seed: seed, Rate: rate, LeadIn: 60 * time.Second, Window: 120 * time.Second, MinRequests: 300}
		n, _ := plan.Counted()
		run, err := load.Run(tb.Context(), changeEnd(plan.Schedule()), limits.Stop(n))
		if err != nil {
			tb.Fatal(err)
		}
		return limits.Judge(run.Samples, n, run.Elapsed).Pass
	}
	low, high := 0.2, 8.0
	for high/low > 1.01 {
		if rate := math.Sqrt(low * high); pass(rate) {
			low = rate
		} else {
			high = rate
		}
	}
	return math.Sqrt(low * high)
}

// runOutBias returns by how many per cent the capacity is too high when the load stops with the window. There is one value for
// each seed, in ascending order.
func runOutBias(tb testing.TB, seeds uint64) []float64 {
	tb.Helper()
	p := profile(tb, "h200-llama70b-fp8")
	var bias []float64
	for seed := range seeds {
		with := capacityOf(tb, p, seed, func(s workload.Schedule) workload.Schedule { return s })
		bias = append(bias, 100*(capacityOf(tb, p, seed, workload.WithoutRunOut)/with-1))
	}
	slices.Sort(bias)
	return bias
}

// Without load after the window, the last requests run on an emptying server. The measured capacity is then too high
// where TPOT breaks first, as here. The capacity is right where TTFT breaks first, because a first token does not wait
// for later requests.
func TestTheRunOutMatters(t *testing.T) {
	realtime.Only(t, "searches ten capacities")
	bias := runOutBias(t, 5)
	if bias[0] < -1 || bias[2] < 0.5 || bias[4] < 2 {
		t.Errorf("without a run-out the capacity is too high by %.1f %% for the seeds; want each at least -1 %%, the median at least 0.5 %% and the largest at least 2 %%", bias)
	}
}

func BenchmarkRunOutBias(b *testing.B) {
	for b.Loop() {
		bias := runOutBias(b, 20)
		b.ReportMetric(mean(bias), "%mean")
		b.ReportMetric(bias[len(bias)/2], "%median")
		b.ReportMetric(bias[len(bias)-1], "%most")
	}
}
