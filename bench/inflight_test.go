package bench

import (
	"math/rand/v2"
	"testing"
	"time"
)

func TestPeakInFlightCountsWholeSeconds(t *testing.T) {
	tests := []struct {
		name    string
		samples []Sample
		want    int
	}{
		{"nothing completed", []Sample{{Due: 1}}, 0},
		{"two requests within one second count as two", []Sample{sample(500, 550, 600), sample(900, 950, 1200)}, 2},
		{"seconds count from the first start", []Sample{sample(900, 950, 1000), sample(1100, 1150, 1200)}, 2},
		{"two requests in different seconds count as one", []Sample{sample(0, 10, 900), sample(1000, 1100, 1900)}, 1},
		{"an end on the second still touches it", []Sample{sample(0, 10, 1000), sample(1500, 1600, 1900)}, 2},
	}
	for _, test := range tests {
		if got := Measure(Run{Samples: test.samples}, Scope{}).PeakInFlight; got != test.want {
			t.Errorf("%s: peak in flight %d, want %d", test.name, got, test.want)
		}
	}
}

// intervals returns n random intervals of up to 5 s that start within one minute, in random order.
func intervals(n int, seed uint64) []interval {
	random := rand.New(rand.NewPCG(seed, 0))
	all := make([]interval, n)
	for i := range all {
		start := time.Duration(random.Int64N(int64(time.Minute)))
		all[i] = interval{start, start + time.Duration(random.Int64N(int64(5*time.Second)))}
	}
	return all
}

func peakOf(keep int, all []interval) *concurrency {
	c := &concurrency{keep: keep}
	for _, s := range all {
		c.add(s)
	}
	return c
}

func TestPeakIsExactOnceTheFirstToStartIsKnown(t *testing.T) {
	for seed := range uint64(20) {
		all := intervals(500, seed)
		first := 0
		for i, s := range all {
			if s.start < all[first].start {
				first = i
			}
		}
		all[0], all[first] = all[first], all[0]
		want := peakOf(0, all).peak()
		if got := peakOf(1, all).peak(); got != want {
			t.Errorf("seed %d: peak %d with sums after 1 request, want %d", seed, got, want)
		}
		if got := peakOf(400, all).peak(); got != want {
			t.Errorf("seed %d: peak %d with sums after 400 requests, want %d", seed, got, want)
		}
	}
}
