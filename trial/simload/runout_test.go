package simload

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/realtime"
	"vllmtuner/serverctl/sim"
	"vllmtuner/trial"
)

// capacityOf bisects the capacity of a simulated H200 to 1 %. Answers have 1000 tokens on average, as in production.
func capacityOf(tb testing.TB, p *sim.Profile, seed uint64, end func(workload.Schedule) workload.Schedule) float64 {
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
		run, err := load.Run(tb.Context(), end(plan.Schedule()), limits.Stop(n))
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

// Without load after the window, the last requests run on an emptying server. The measured capacity is then too high where TPOT
// breaks first, as here. It is right where TTFT breaks first, because a first token does not wait for later requests.
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
