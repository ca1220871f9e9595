package bench

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// queue simulates an open loop at the given rate and returns its samples as they are after the given length of time.
// The server generates first tokens one after the other, on average at most capacity of them per second. Each answer
// ends one second after its first token.
func queue(rate, capacity float64, length time.Duration, seed uint64) []Sample {
	random := rand.New(rand.NewPCG(seed, 1))
	var all []Sample
	var due, free float64
	for {
		due += random.ExpFloat64() / rate
		if due > length.Seconds() {
			return all
		}
		free = max(free, due) + random.ExpFloat64()/capacity
		s := Sample{Index: len(all), Due: duration(due), Sent: duration(due), WantTokens: 11}
		if free < length.Seconds() {
			s.First = duration(free)
		}
		if end := free + 1; end < length.Seconds() {
			s.Last, s.End, s.OutputTokens = duration(end), duration(end), 11
		}
		all = append(all, s)
	}
}

func duration(seconds float64) time.Duration { return time.Duration(seconds * float64(time.Second)) }

// In each second 30 requests arrive and 20 are served. So in each second the server serves the arrivals of 2/3 s, and
// TTFT grows by 1/3 s.
func TestTheSlopeOfAnOverloadedServer(t *testing.T) {
	var slopes []float64
	for seed := range uint64(40) {
		slope := TTFTSlope(queue(30, 20, time.Minute, seed), time.Minute)
		slopes = append(slopes, slope.PerSecond)
		if slope.PerSecond < 4*slope.StdErr {
			t.Errorf("seed %d: %+v, want a slope four errors above zero", seed, slope)
		}
	}
	if s := StatsOf(slopes); math.Abs(s.Mean-1.0/3) > 0.05 {
		t.Errorf("TTFT grows by %.3f s per second, want 0.333", s.Mean)
	}
}

// On a server without overload, the 95 % interval of a slope should contain zero in about 95 of 100 runs. With a fit to
// single requests, the interval would contain zero in only 72.
func TestTheErrorOfASlopeIsHonest(t *testing.T) {
	const runs = 200
	covered := 0
	for seed := range uint64(runs) {
		slope := TTFTSlope(queue(10, 40, time.Minute, seed), time.Minute)
		if math.Abs(slope.PerSecond) < 2.306*slope.StdErr { // 2.306 bounds the 95 % interval of Student's t with eight degrees of freedom
			covered++
		}
	}
	if covered < runs*88/100 || covered > runs*99/100 {
		t.Errorf("zero is within the 95 %% interval in %d of %d runs", covered, runs)
	}
}

func TestFewRequestsHaveNoSlope(t *testing.T) {
	for name, samples := range map[string][]Sample{
		"no request":                   nil,
		"a request that was just sent": {{Due: time.Second, Sent: time.Second}},
		"one first token":              {{Due: 0, First: 100, WantTokens: 5}},
	} {
		if slope := TTFTSlope(samples, time.Second); slope != (Slope{}) {
			t.Errorf("%s: %+v, want no slope", name, slope)
		}
	}
}
