package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestATrendCountsWhatIsOverNow(t *testing.T) {
	ms := time.Millisecond
	limits := []Limit{{MetricTTFT, 100 * ms}, {MetricTPOT, 10 * ms}, {MetricE2EL, 1000 * ms}}
	waiting := func(due int) Sample { return Sample{Due: time.Duration(due) * ms, WantTokens: 11} }
	streaming := func(due, first, chunks int) Sample {
		s := waiting(due)
		s.Sent, s.First, s.Chunks = s.Due, time.Duration(first)*ms, chunks
		return s
	}
	failed := Sample{Due: 1, End: 2, Failure: Status}
	for _, row := range []struct {
		name   string
		sample Sample
		now    int
		over   []int
		broken int
	}{
		{"a good answer", sample(0, 90, 190), 2000, []int{0, 0, 0}, 0},
		{"an answer at the limits", sample(0, 100, 200), 2000, []int{0, 0, 0}, 0},
		{"an answer over TTFT", sample(0, 101, 200), 2000, []int{1, 0, 0}, 1},
		{"an answer over TPOT", sample(0, 90, 191), 2000, []int{0, 1, 0}, 1},
		{"an answer over two counts as one broken", sample(0, 950, 1060), 2000, []int{1, 1, 1}, 1},
		{"a failed one counts only as failed", failed, 2000, []int{0, 0, 0}, 1},
		{"a waiting one may still keep its limit", waiting(500), 600, []int{0, 0, 0}, 0},
		{"a waiting one over its limit counts now", waiting(500), 601, []int{1, 0, 0}, 1},
		{"one whose first token was late stays over", streaming(0, 150, 1), 160, []int{1, 0, 0}, 1},
		{"ten more tokens could still come in time", streaming(0, 50, 1), 150, []int{0, 0, 0}, 0},
		{"ten more tokens cannot come in time any more", streaming(0, 50, 1), 151, []int{0, 1, 0}, 1},
		{"one with all its tokens waits for its end", streaming(0, 50, 11), 1500, []int{0, 0, 0}, 0},
		{"one that must end too late counts now", streaming(0, 50, 1), 1001, []int{0, 1, 1}, 1},
	} {
		trend := TrendOf([]Sample{row.sample}, time.Duration(row.now)*ms, time.Second, Rules033, limits)
		over := []int{trend.Over[0].Over, trend.Over[1].Over, trend.Over[2].Over}
		if !slices.Equal(over, row.over) || trend.Broken != row.broken || trend.Completed+trend.Failed+trend.Pending != 1 {
			t.Errorf("%s: %v over, %d broken of %+v, want %v and %d", row.name, over, trend.Broken, trend, row.over, row.broken)
		}
	}
}

// queue returns the samples of an open loop at the given rate, as they are after the given length. The server generates
// first tokens in order, at most at the served rate. Each answer ends a second after its first token.
func queue(rate, served float64, length time.Duration, seed uint64) []Sample {
	random := rand.New(rand.NewPCG(seed, 1))
	var all []Sample
	var due, free float64
	for {
		due += random.ExpFloat64() / rate
		if due > length.Seconds() {
			return all
		}
		free = max(free, due) + random.ExpFloat64()/served
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

func TestTheSlopesOfAnOverloadedServer(t *testing.T) {
	var inFlight, ttft []float64
	for seed := range uint64(40) {
		trend := TrendOf(queue(30, 20, time.Minute, seed), time.Minute, 40*time.Second, Rules033, nil)
		inFlight, ttft = append(inFlight, trend.InFlight.PerSecond), append(ttft, trend.TTFT.PerSecond)
		if trend.InFlight.PerSecond < 4*trend.InFlight.StdErr || trend.TTFT.PerSecond < 4*trend.TTFT.StdErr || trend.InFlight.Pieces != 10 {
			t.Errorf("seed %d: %+v, want both slopes four errors above zero", seed, trend)
		}
	}
	// 10 requests more arrive per second than are served. In each second the server serves 2/3 of a second of arrivals, so
	// TTFT grows by 1/3 s per second.
	if a, b := StatsOf(inFlight), StatsOf(ttft); math.Abs(a.Mean-10) > 1 || math.Abs(b.Mean-1.0/3) > 0.05 {
		t.Errorf("in flight grows by %.2f per second, TTFT by %.3f s per second, want 10 and 0.333", a.Mean, b.Mean)
	}
}

// On a server without overload, the 95 % interval of a slope should contain zero in about 95 of 100 runs. It does in 93. A
// fit to single requests would contain it in 72 of the same runs, and a fit to the number in flight ten times a second in
// 48.
func TestTheErrorOfASlopeIsHonest(t *testing.T) {
	const runs = 200
	covered := [2]int{}
	for seed := range uint64(runs) {
		trend := TrendOf(queue(10, 40, 2*time.Minute, seed), 2*time.Minute, time.Minute, Rules033, nil)
		for i, s := range []Slope{trend.InFlight, trend.TTFT} {
			if math.Abs(s.PerSecond) < 2.306*s.StdErr { // 95 % of Student's t with eight degrees of freedom
				covered[i]++
			}
		}
	}
	for i, name := range []string{"in flight", "TTFT"} {
		if covered[i] < runs*88/100 || covered[i] > runs*99/100 {
			t.Errorf("%s: zero is within the 95 %% interval in %d of %d runs", name, covered[i], runs)
		}
	}
}

func TestATrendOfFewRequestsHasNoSlopes(t *testing.T) {
	for name, samples := range map[string][]Sample{
		"no request":                   nil,
		"a request that was just sent": {{Due: time.Second, Sent: time.Second}},
	} {
		if trend := TrendOf(samples, time.Second, 10*time.Second, Rules033, nil); trend.InFlight != (Slope{}) || trend.TTFT != (Slope{}) {
			t.Errorf("%s: %+v, want no slopes", name, trend)
		}
	}
	steady := []Sample{{Due: 0, First: 100, WantTokens: 5}}
	if trend := TrendOf(steady, time.Minute, time.Minute, Rules033, nil); math.Abs(trend.InFlight.PerSecond) > 1e-9 || trend.InFlight.Pieces != 10 || trend.TTFT.Pieces != 0 {
		t.Errorf("one request that stays: %+v, want a slope of zero in flight and none of TTFT", trend)
	}
}
