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
	"vllmtuner/trial/slo"
)

// capacityOf finds the capacity of a simulated H200 by bisection, to 1 %, under answers as long as in production.
func capacityOf(tb testing.TB, p *sim.Profile, seed uint64, end func(workload.Schedule) workload.Schedule) float64 {
	tb.Helper()
	source, err := workload.Open(workload.Spec{Kind: "random", InputTokens: 1500, OutputTokens: 1000}, seed)
	if err != nil {
		tb.Fatal(err)
	}
	limits := slo.SLO{Limits: []slo.Limit{{Metric: slo.TTFT, Percentile: 99, Max: 2 * time.Second}, {Metric: slo.TPOT, Percentile: 99, Max: 60 * time.Millisecond}}}
	rig := &Rig{Profile: p}
	pass := func(rate float64) bool {
		_, load, err := rig.Start(tb.Context(), trial.Launch{Args: strings.Fields("--max-model-len 16384 --max-num-seqs 512")})
		if err != nil {
			tb.Fatal(err)
		}
		plan := workload.Plan{Source: source, Seed: seed, Rate: rate, LeadIn: 60 * time.Second, Window: 120 * time.Second, MinRequests: 300}
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

// runOutBias returns by how many per cent the capacity reads too high when the load stops with the window: one value per seed,
// ascending.
func runOutBias(tb testing.TB, seeds uint64) []float64 {
	tb.Helper()
	p, err := sim.LoadProfile("h200-llama70b-fp8")
	if err != nil {
		tb.Fatal(err)
	}
	var bias []float64
	for seed := range seeds {
		with := capacityOf(tb, p, seed, func(s workload.Schedule) workload.Schedule { return s })
		bias = append(bias, 100*(capacityOf(tb, p, seed, workload.WithoutRunOut)/with-1))
	}
	slices.Sort(bias)
	return bias
}

// Without load after the window, the last requests run on an emptying server. Where TPOT breaks first, as here, the capacity then
// reads too high. Where TTFT breaks first it makes no difference, because first tokens do not wait for later requests.
func TestTheRunOutMatters(t *testing.T) {
	realtime.Only(t, "searches ten capacities")
	bias := runOutBias(t, 5)
	if bias[0] < -1 || bias[2] < 0.5 || bias[4] < 2 {
		t.Errorf("without a run-out the capacity reads too high by %.1f %%, want no seed below -1 %%, the middle one above 0.5 %% and the last above 2 %%", bias)
	}
}

func BenchmarkRunOutBias(b *testing.B) {
	for b.Loop() {
		bias := runOutBias(b, 20)
		sum := 0.0
		for _, x := range bias {
			sum += x
		}
		b.ReportMetric(sum/float64(len(bias)), "%mean")
		b.ReportMetric(bias[len(bias)/2], "%median")
		b.ReportMetric(bias[len(bias)-1], "%most")
	}
}
