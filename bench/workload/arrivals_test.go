package workload

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"gonum.org/v1/gonum/stat/distuv"
)

// windowGaps returns the sorted gaps of the first n arrivals of the window, in units of the mean gap.
func windowGaps(p Plan, n int) []float64 {
	p.MinRequests = n
	var gaps []float64
	last := p.LeadIn
	for a := range p.Schedule() {
		if a.Phase == Window && len(gaps) < n {
			gaps = append(gaps, (a.Due-last).Seconds()*p.Rate)
			last = a.Due
		}
		if len(gaps) == n {
			break
		}
	}
	slices.Sort(gaps)
	return gaps
}

// distance returns the Kolmogorov-Smirnov distance of a sorted sample from a distribution.
func distance(sample []float64, cdf func(float64) float64) float64 {
	largest, n := 0.0, float64(len(sample))
	for i, x := range sample {
		f := cdf(x)
		largest = max(largest, f-float64(i)/n, float64(i+1)/n-f)
	}
	return largest
}

// critical returns the critical value of the Kolmogorov-Smirnov distance for n samples, at significance 0.0001
// (Kolmogorov's limit distribution).
func critical(n int) float64 { return math.Sqrt(-math.Log(0.0001/2) / 2 / float64(n)) }

func TestArrivalsHaveTheirDistribution(t *testing.T) {
	const n = 4000
	source := open(t, Spec{Kind: "random", InputTokens: 1, OutputTokens: 1}, 1)
	gammas := []float64{0.25, 0.5, 1, 2, 10}
	for seed := range uint64(5) {
		for _, burstiness := range gammas {
			p := Plan{Source: source, Seed: seed, Rate: 5, LeadIn: time.Second, Arrivals: Arrivals{Burstiness: burstiness}}
			gaps := windowGaps(p, n)
			for _, claimed := range gammas {
				cdf := distuv.Gamma{Alpha: claimed, Beta: claimed}.CDF
				if d := distance(gaps, cdf); (d > critical(n)) != (claimed != burstiness) {
					t.Errorf("seed %d: gaps of burstiness %g are %.3f from gamma(%g), critical is %.3f", seed, burstiness, d, claimed, critical(n))
				}
			}
		}
	}
}

func TestConstantArrivalsHaveOneGap(t *testing.T) {
	p := plan(t, 4)
	p.Arrivals.Burstiness = math.Inf(1)
	gaps := windowGaps(p, 1000)
	if gaps[0] < 0.999999 || gaps[999] > 1.000001 {
		t.Errorf("gaps from %g to %g, want all 1", gaps[0], gaps[999])
	}
	if n, length := p.Counted(); n != 479 || length != 120*time.Second {
		t.Errorf("Counted() = %d, %s, want the 479 requests due within 120 s", n, length)
	}
}

func TestArrivalsOfATraceHaveItsGapsAtAnyRate(t *testing.T) {
	trace, err := OpenTrace(Spec{Kind: "trace", Path: examples + "azure.csv"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	var want []float64
	for i := range trace.Len() - 1 {
		want = append(want, float64(trace.times[i+1]-trace.times[i])/trace.meanGap())
	}
	near(t, "mean gap", mean(want), 1, 1e-9)
	slices.Sort(want)
	first := make(map[time.Duration]bool)
	for seed := range uint64(20) {
		p := plan(t, 3)
		p.Seed, p.Arrivals.Trace = seed, trace
		got := windowGaps(p, len(want)) // one cycle of the trace, from any start
		for i := range want {
			if math.Abs(got[i]-want[i]) > 1e-6 {
				t.Fatalf("seed %d: gaps %.3f, want the gaps of the trace, %.3f", seed, got, want)
			}
		}
		for a := range p.Schedule() {
			if a.Phase == Window {
				first[a.Due-p.LeadIn] = true
				break
			}
		}
	}
	if len(first) < 4 {
		t.Errorf("20 seeds start at %d different gaps of the trace, want many", len(first))
	}
}

func TestCommonRandomNumbers(t *testing.T) {
	trace, err := OpenTrace(Spec{Kind: "trace", Path: examples + "burstgpt.csv"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	for _, arrivals := range []Arrivals{{}, {Burstiness: 0.5}, {Burstiness: 3}, {Burstiness: math.Inf(1)}, {Trace: trace}} {
		for _, spec := range []Spec{{Kind: "production"}, {Kind: "shared-prefix", HitPercent: 50, Groups: 3}, {Kind: "trace", Path: examples + "mooncake.jsonl"}} {
			slow := Plan{Source: open(t, spec, 5), Seed: 9, Rate: 2, LeadIn: 10 * time.Second, Window: 30 * time.Second, MinRequests: 60, Arrivals: arrivals}
			fast := slow
			fast.Source, fast.Rate = open(t, spec, 5), 8
			next := windowOf(fast)
			for i, a := range windowOf(slow) {
				if i >= len(next) {
					break
				}
				b := next[i]
				if d := (a.Due - slow.LeadIn) - 4*(b.Due-fast.LeadIn); d < -10 || d > 10 { // nanoseconds of rounding
					t.Fatalf("%+v: arrival %d is due at %s and %s, want a factor of 4", arrivals, i, a.Due, b.Due)
				}
				if !slices.Equal(a.Request.Tokens, b.Request.Tokens) || a.Request.OutputTokens != b.Request.OutputTokens {
					t.Fatalf("%s: request %d depends on the rate", slow.Source.Name(), i)
				}
			}
		}
	}
}

func windowOf(p Plan) (window []Arrival) {
	for _, a := range arrivals(p.Schedule(), 0) {
		if a.Phase == Window {
			window = append(window, a)
		}
	}
	return window
}

func TestCheckRefusesBadArrivals(t *testing.T) {
	oneRow := &Trace{times: []time.Duration{0}, source: &finite{population: population{name: "trace x"}}}
	sameTime := &Trace{times: []time.Duration{0, 0}, source: &finite{population: population{name: "trace x"}}}
	for _, test := range []struct {
		name     string
		arrivals Arrivals
		want     string
	}{
		{"nothing", Arrivals{}, ""},
		{"constant", Arrivals{Burstiness: math.Inf(1)}, ""},
		{"a negative burstiness", Arrivals{Burstiness: -1}, "burstiness -1: must be above 0"},
		{"no number", Arrivals{Burstiness: math.NaN()}, "burstiness NaN: must be above 0"},
		{"two at once", Arrivals{Burstiness: 1, Trace: sameTime}, "exclude each other"},
		{"a trace of one", Arrivals{Trace: oneRow}, "trace x has no gaps"},
		{"a trace of one moment", Arrivals{Trace: sameTime}, "use a trace with at least two timestamps"},
	} {
		if got := fmt.Sprint(test.arrivals.Check()); (test.want == "") != (got == "<nil>") || !strings.Contains(got, test.want) {
			t.Errorf("%s: Check() = %s, want %q in it", test.name, got, test.want)
		}
	}
}

// A resumed study needs the same requests and arrivals as before. The checksums were taken when these populations were
// first released.
func TestDrawsNeverChange(t *testing.T) {
	tests := []struct {
		spec Spec
		want uint64
	}{
		{Spec{Kind: "phase1"}, 0x36641e6bb9dade9f},
		{Spec{Kind: "production"}, 0xf5c54ddb6c12b745},
		{Spec{Kind: "random", InputTokens: 50, RangeRatio: 0.5}, 0x76938dcc150e072c},
		{Spec{Kind: "random", InputTokens: 50, RangeRatio: 0.5, Requests: 40}, 0xba5d0bbb9affc2cc},
		{Spec{Kind: "jsonl", Path: examples + "questions.jsonl", Requests: 20}, 0xa2cb9b8cdf14a8f6},
		{Spec{Kind: "sharegpt", Path: examples + "sharegpt.json"}, 0xe32ecd964a86f174},
	}
	for _, test := range tests {
		source := open(t, test.spec, 7)
		p := Plan{Source: source, Seed: 9, Rate: 4, LeadIn: 10 * time.Second, Window: 60 * time.Second, MinRequests: 100}
		pass := Pass{Source: source, Seed: 9, Stream: PrimeStream, Rate: 4, First: 3, N: 10}
		if got := sum(t, arrivals(p.Schedule(), 20), pass); got != test.want {
			t.Errorf("%s: the first draws have the checksum %#x, want %#x", source.Name(), got, test.want)
		}
	}
}
