package slo

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"vllmtuner/bench"
)

// latencies draws n lognormal latencies. Their logarithms have the given correlation between neighbours; 0 makes them
// independent.
func latencies(n int, correlation float64, seed uint64) []float64 {
	random := rand.New(rand.NewPCG(seed, 3))
	state, values := random.NormFloat64(), make([]float64, n)
	for i := range values {
		state = correlation*state + math.Sqrt(1-correlation*correlation)*random.NormFloat64()
		values[i] = 100 * math.Exp(0.5*state)
	}
	return values
}

// The test compares the estimated standard error with the true one: the spread of the percentile over 120 independent
// windows.
func TestTheStandardErrorIsHonest(t *testing.T) {
	const windows = 120
	for _, row := range []struct {
		name        string
		correlation float64
		n           int
		percentile  float64
		low, high   float64 // range of the estimated error (root mean square), relative to the true error
		independent float64 // upper limit of the error that assumes independent requests, relative to the true error
	}{
		{"independent requests", 0, 1000, 99, 0.9, 1.4, 1.2},
		{"independent requests, as few as it takes", 0, 100, 99, 0.7, 1.5, 1.5},
		{"bursts of ten", 0.9, 1000, 99, 0.8, 1.3, 0.75},
		{"bursts of fifty", 0.98, 1000, 99, 0.7, 1.3, 0.45},
		{"bursts of fifty and the median", 0.98, 1000, 50, 0.8, 1.2, 0.25},
	} {
		var sum, squares, errors, independents float64
		for seed := range uint64(windows) {
			values := latencies(row.n, row.correlation, seed)
			se, effective := standardError(values, row.percentile)
			if !(se > 0 && effective > 0 && effective <= float64(row.n)) {
				t.Fatalf("%s, seed %d: error %g of %g independent ones", row.name, seed, se, effective)
			}
			v := math.Log(quantile(values, row.percentile))
			sum, squares = sum+v, squares+v*v
			errors += se * se
			independents += se * se * effective / float64(row.n)
		}
		truth := math.Sqrt(squares/windows - sum*sum/windows/windows)
		got, independent := math.Sqrt(errors/windows)/truth, math.Sqrt(independents/windows)/truth
		if got < row.low || got > row.high || independent > row.independent {
			t.Errorf("%s: the standard error is %.2f of the true one, and for independent requests %.2f, want %.2f to %.2f and at most %.2f",
				row.name, got, independent, row.low, row.high, row.independent)
		}
	}
}

func quantile(values []float64, percentile float64) float64 {
	c, _ := Limit{TTFT, percentile, time.Second}.check(samplesOf(values), len(values), time.Hour)
	return c.ValueMS
}

// samplesOf returns completed requests with the given TTFTs in milliseconds.
func samplesOf(values []float64) []bench.Sample {
	all := make([]bench.Sample, len(values))
	for i, v := range values {
		all[i] = good(time.Duration(v*float64(ms)), 40*ms)
	}
	return all
}

func TestOfTooFewRequestsNoErrorIsKnown(t *testing.T) {
	for _, n := range []int{0, 1, 19, 99} {
		if se, effective := standardError(latencies(n, 0, 1), 99); se != 0 || effective != 0 {
			t.Errorf("of %d requests the error is %g of %g independent ones, want nothing known", n, se, effective)
		}
	}
	c := chatSLO.Judge(samplesOf(latencies(300, 0.9, 1)), 300, time.Minute).Checks[0]
	if c.HeadroomSE <= 0 || c.EffectiveN <= 0 || c.EffectiveN >= 300 {
		t.Errorf("a check of 300 requests that come in bursts is %+v, want an error, of fewer independent ones", c)
	}
}

// queueSamples returns the samples of an open loop. The server sends first tokens in the order of the requests, at most
// at the served rate. Each answer ends one second after its first token.
func queueSamples(rate, served float64, length time.Duration, seed uint64) []bench.Sample {
	random := rand.New(rand.NewPCG(seed, 4))
	var all []bench.Sample
	var due, free float64
	for {
		if due += random.ExpFloat64() / rate; due > length.Seconds() {
			return all
		}
		free = max(free, due) + random.ExpFloat64()/served
		first, end := seconds(free), seconds(free+1)
		all = append(all, bench.Sample{
			Index: len(all), Due: seconds(due), Sent: seconds(due), First: first, Last: end, End: end, OutputTokens: 11, WantTokens: 11, Chunks: 11,
		})
	}
}

// seenAt returns the samples as a Stop sees them at the time now.
func seenAt(now time.Duration, all []bench.Sample) []bench.Sample {
	var seen []bench.Sample
	for _, s := range all {
		if s.Due > now {
			break
		}
		if s.End > now {
			s.Last, s.End, s.OutputTokens, s.Chunks = s.First, 0, 0, 1
		}
		if s.First > now {
			s.First, s.Last, s.Chunks = 0, 0, 0
		}
		seen = append(seen, s)
	}
	return seen
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func TestAGrowingQueueFails(t *testing.T) {
	patient := SLO{Limits: []Limit{{TTFT, 99, time.Hour}, {TPOT, 99, time.Hour}}}
	const window, ever, draws = 2 * time.Minute, time.Hour, 12
	for _, row := range []struct {
		name         string
		rate, served float64
		length       time.Duration
		least, most  int // smallest and largest number of the 12 windows that may fail
		stop         int // smallest number of the 12 windows that must end early
	}{
		{"half of what is served", 10, 20, window, 0, 0, 0},
		{"nine tenths of what is served", 18, 20, window, 0, 0, 0},
		{"a fifth more than is served", 24, 20, window, 12, 12, 11},
		{"half as much again as is served", 30, 20, window, 12, 12, 12},
		{"half as much again as is served, and too short to tell", 30, 20, 15 * time.Second, 0, 0, 0},
	} {
		failed, stopped := 0, 0
		for seed := range uint64(draws) {
			samples := queueSamples(row.rate, row.served, row.length, seed)
			v := patient.Judge(samples, len(samples), ever)
			if !v.Pass {
				failed++
				// The headroom is about ln(served / rate), because the queue is served in order and grows with the
				// difference of the two rates.
				if v.Binding != overSaturated || v.Headroom >= 0 || row.rate > row.served && math.Abs(v.Headroom-math.Log(row.served/row.rate)) > 0.15 {
					t.Errorf("%s, seed %d: %s by %s, headroom %g, want about %g", row.name, seed, v.Reason, v.Binding, v.Headroom, math.Log(row.served/row.rate))
				}
			}
			stop := patient.Stop(len(samples))
			for now := time.Second; now < row.length; now += 10 * time.Second {
				seen := seenAt(now, samples)
				if !stop(now, seen) {
					continue
				}
				stopped++
				if v := patient.Judge(seen, len(samples), now); v.Pass || v.Binding != overSaturated {
					t.Errorf("%s, seed %d: ended after %s, and the verdict is %+v", row.name, seed, now, v)
				}
				break
			}
		}
		if failed < row.least || failed > row.most || stopped < row.stop || stopped > row.most {
			t.Errorf("%s: %d of 12 windows fail and %d are ended early, want %d to %d and at least %d", row.name, failed, stopped, row.least, row.most, row.stop)
		}
	}
}

func TestAGrowingQueueHasItsOwnWords(t *testing.T) {
	samples := queueSamples(30, 20, 2*time.Minute, 1)
	v := SLO{Limits: []Limit{{TTFT, 99, time.Hour}}}.Judge(samples, len(samples), time.Hour)
	if want := "over-saturated: TTFT grew by 0.34 s in each second of the window and the queue by 10 requests; at this rate no latency is stable"; v.Reason != want {
		t.Errorf("the reason is %q, want %q", v.Reason, want)
	}
	if v := chatSLO.Judge(samples, len(samples), time.Hour); v.Binding != "p99 TTFT" {
		t.Errorf("a growing queue that breaks a limit fails by %s, want the limit", v.Binding)
	}
}

func TestMinRequests(t *testing.T) {
	for _, row := range []struct {
		percentile float64
		want       int
	}{{50, 2}, {90, 10}, {95, 20}, {99, 100}, {99.5, 200}, {99.9, 1000}, {99.99, 10000}, {33.3, 2}} {
		l := Limit{TTFT, row.percentile, time.Second}
		if got := l.MinRequests(); got != row.want {
			t.Errorf("p%g takes %d requests, want %d", row.percentile, got, row.want)
		}
		for _, n := range []int{row.want - 1, row.want} {
			v := SLO{Limits: []Limit{l}}.Judge(samples(n), n, time.Minute)
			if v.Pass != (n == row.want) || (v.Binding == tooFew) == v.Pass || (v.Checks[0].Allowed > 0) != v.Pass {
				t.Errorf("%d good requests under p%g: %+v", n, row.percentile, v)
			}
		}
	}
	mixed := SLO{Limits: []Limit{{ITL, 99.99, time.Second}, {TTFT, 99.9, time.Second}, {TPOT, 50, time.Second}}}
	if n, l := mixed.MinRequests(); n != 1000 || l != mixed.Limits[1] {
		t.Errorf("%s takes %d requests by %s, want 1000 by p99.9 TTFT", mixed, n, l)
	}
}
