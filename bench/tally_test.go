package bench

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"
)

// manySamples returns n requests of every kind, in random order.
func manySamples(n int, seed uint64) []Sample {
	random := rand.New(rand.NewPCG(seed, 7))
	until := func(limit time.Duration) time.Duration { return time.Duration(random.Int64N(int64(limit))) }
	all := make([]Sample, n)
	for i := range all {
		s := Sample{Index: i, Due: until(time.Minute), PromptTokens: random.IntN(5000), CachedTokens: random.IntN(100), WantTokens: 1 + random.IntN(200)}
		s.Sent = s.Due + until(time.Millisecond)
		s.Connected = s.Sent + until(3)*time.Millisecond
		s.Opened = s.Sent + time.Duration(math.Exp(18+2*random.NormFloat64())) // 65 ms, log-normal
		s.First = s.Opened + until(100*time.Microsecond)
		s.Last, s.OutputTokens, s.Chunks = s.First, s.WantTokens, s.WantTokens
		for range s.Chunks - 1 {
			gap := until(40 * time.Millisecond)
			s.Gaps, s.Last = append(s.Gaps, gap), s.Last+gap
		}
		s.Closed = s.Last + until(time.Millisecond)
		s.End = s.Closed + until(time.Millisecond)
		s.ReadLag = max(0, until(time.Millisecond)-500*time.Microsecond)
		s.Turn, s.LastTurn = random.IntN(4), random.IntN(3) == 0
		switch random.IntN(20) {
		case 0:
			s.Failure = Reset
		case 1:
			s.Failure, s.OutputTokens = WrongLength, s.WantTokens/2
		case 2:
			s = Sample{Due: s.Due} // pending
		}
		all[i] = s
	}
	return all
}

var allLimits = []Limit{{MetricTTFT, 200 * time.Millisecond}, {MetricTPOT, 20 * time.Millisecond}, {MetricE2EL, 3 * time.Second}}

// flatten returns the fields of a measurement's JSON. A field's key is its path.
func flatten(t *testing.T, m Measurement) map[string]any {
	t.Helper()
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var tree any
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	all := make(map[string]any)
	var walk func(path string, node any)
	walk = func(path string, node any) {
		if branch, ok := node.(map[string]any); ok {
			for key, child := range branch {
				walk(path+"/"+key, child)
			}
			return
		}
		all[path] = node
	}
	walk("", tree)
	return all
}

// A Tally gives the same figures as the samples: percentiles within the sketch's accuracy, all others within rounding.
func TestATallyHasTheFiguresOfTheSamples(t *testing.T) {
	for _, rules := range []Rules{Rules033, Rules0141} {
		for seed, n := range []int{0, 1, 2, 5, 40, 700, 3000} {
			samples := manySamples(n, uint64(seed))
			scope := Scope{Rate: 3, Start: 50 * time.Millisecond, Length: time.Minute, Rules: rules, Limits: allLimits}
			exact := flatten(t, Measure(Run{Samples: samples}, scope))
			tally := newTally(rules, allLimits)
			for i := range samples {
				tally.Add(&samples[i])
			}
			compare(t, fmt.Sprintf("%d samples", n), exact, flatten(t, Measure(Run{Tally: tally}, scope)))
		}
	}
}

func compare(t *testing.T, name string, exact, got map[string]any) {
	t.Helper()
	if len(exact) != len(got) {
		t.Errorf("%s: %d fields, want %d", name, len(got), len(exact))
	}
	for path, want := range exact {
		tolerance := 1e-9
		for _, p := range []string{"/p50", "/p90", "/p95", "/p99", "/p99.9"} {
			if len(path) > len(p) && path[len(path)-len(p):] == p {
				tolerance = sketchAccuracy * (1 + 1e-9)
			}
		}
		a, isNumber := want.(float64)
		b, _ := got[path].(float64)
		switch {
		case path == "/exact":
			if want != true || got[path] != false {
				t.Errorf("%s: exact is %v from samples and %v from a tally, want true and false", name, want, got[path])
			}
		case isNumber && math.Abs(a-b) > tolerance*math.Abs(a):
			t.Errorf("%s: %s = %v, want %v within %g", name, path, b, a, tolerance)
		case !isNumber && !reflect.DeepEqual(want, got[path]):
			t.Errorf("%s: %s = %v, want %v", name, path, got[path], want)
		}
	}
}

func TestASketchHandlesExtremes(t *testing.T) {
	for _, row := range []struct {
		name   string
		values []float64
		p      float64
		want   float64
	}{
		{"a nanosecond", []float64{1e-6}, 50, 1e-6},
		{"a year", []float64{3.2e10}, 50, 3.2e10},
		{"zero has no logarithm", []float64{0, 0, 0, 8}, 50, 0},
		{"between zero and a value", []float64{0, 8}, 50, 4},
		{"the largest of many", []float64{1, 2, 3, 1e6}, 100, 1e6},
		{"interpolated over a wide gap, as numpy does", []float64{10, 1000}, 99, 990.1},
		{"nothing", nil, 99, 0},
	} {
		s := newSketch()
		for _, v := range row.values {
			s.add(v)
		}
		if got := s.percentile(row.p); math.Abs(got-row.want) > sketchAccuracy*row.want {
			t.Errorf("%s: p%g = %g, want %g within 0.5 %%", row.name, row.p, got, row.want)
		}
	}
}

// The memory of a run of millions of requests must not grow. When each second and each bucket of latency has occurred
// before, Add allocates nothing.
func TestAWarmTallyDoesNotAllocate(t *testing.T) {
	samples := manySamples(1000, 3)
	tally := newTally(Rules0141, allLimits)
	for range maxEarly/len(samples) + 2 {
		for i := range samples {
			tally.Add(&samples[i])
		}
	}
	i := 0
	if allocs := testing.AllocsPerRun(2000, func() { tally.Add(&samples[i%len(samples)]); i++ }); allocs != 0 {
		t.Errorf("Add allocates %g times, want 0", allocs)
	}
}

func BenchmarkTallyAdd(b *testing.B) {
	with, without := manySamples(1000, 3), manySamples(1000, 3)
	for i := range without {
		without[i].Gaps = nil
	}
	for name, samples := range map[string][]Sample{"with gaps": with, "without gaps": without} {
		b.Run(name, func(b *testing.B) {
			tally, i, gaps := newTally(Rules033, allLimits), 0, 0
			b.ReportAllocs()
			for b.Loop() {
				s := &samples[i%len(samples)]
				tally.Add(s)
				gaps += len(s.Gaps)
				i++
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "req/s")
			b.ReportMetric(float64(gaps)/b.Elapsed().Seconds(), "gaps/s")
		})
	}
}

func BenchmarkMeasure(b *testing.B) {
	samples := manySamples(10_000, 3)
	for i := range samples {
		samples[i].Gaps = nil
	}
	run, scope := Run{Samples: samples}, Scope{Length: time.Minute, Limits: allLimits}
	b.ReportAllocs()
	for b.Loop() {
		Measure(run, scope)
	}
	b.ReportMetric(float64(b.N*len(samples))/b.Elapsed().Seconds(), "req/s")
}

// Sketches count each value in its bucket, whether the tally kept the values or not.
func TestSketchesCountTheValues(t *testing.T) {
	limit := 1.005 / 0.995
	kept, sketched := newExactTally("", nil), newTally("", nil)
	for i := range 500 {
		first := time.Duration(i*i) * time.Microsecond
		s := Sample{Sent: 1, First: 1 + first, Last: 1 + first + time.Second, End: 1 + first + time.Second, OutputTokens: 11, WantTokens: 11}
		kept.Add(&s)
		sketched.Add(&s)
	}
	got := kept.measurement(Scope{Sketches: true}).Sketches
	if again := sketched.measurement(Scope{Sketches: true}).Sketches; !reflect.DeepEqual(got, again) {
		t.Errorf("from kept values the sketches are %+v, from sketches %+v", got, again)
	}
	if got.ITL != nil || got.TPOT == nil || got.E2E == nil {
		t.Errorf("sketches %+v, want TTFT, TPOT and E2E only", got)
	}
	n := got.TTFT.Zeros
	for i, count := range got.TTFT.Counts {
		from, to := math.Pow(limit, float64(got.TTFT.First+i)), math.Pow(limit, float64(got.TTFT.First+i+1))
		in := 0
		for _, v := range kept.ttft.values {
			if v >= from*(1-1e-9) && v < to*(1-1e-9) {
				in++
			}
		}
		if n += count; in != count {
			t.Errorf("bucket %d has %d values, want %d from %g to %g ms", i, count, in, from, to)
		}
	}
	if n != 500 {
		t.Errorf("the sketch has %d values, want 500", n)
	}
	if m := kept.measurement(Scope{}); !reflect.DeepEqual(m.Sketches, Sketches{}) {
		t.Error("the measurement has sketches without Scope.Sketches")
	}
}

func TestAPendingRequestIsOverdueWhenItMustEndOverItsLimit(t *testing.T) {
	ms := time.Millisecond
	limits := []Limit{{MetricTTFT, 100 * ms}, {MetricTPOT, 10 * ms}, {MetricE2EL, 1000 * ms}}
	waiting := Sample{Due: 500 * ms, WantTokens: 11}
	streaming := func(first time.Duration, chunks int) Sample {
		return Sample{First: first, WantTokens: 11, Chunks: chunks}
	}
	for _, row := range []struct {
		name   string
		sample Sample
		now    time.Duration
		want   []bool
	}{
		{"a waiting one may still keep its limit", waiting, 600 * ms, []bool{false, false, false}},
		{"a waiting one over its limit", waiting, 601 * ms, []bool{true, false, false}},
		{"one whose first token was late stays over", streaming(150*ms, 1), 160 * ms, []bool{true, false, false}},
		{"ten more tokens could still come in time", streaming(50*ms, 1), 150 * ms, []bool{false, false, false}},
		{"ten more tokens cannot come in time any more", streaming(50*ms, 1), 151 * ms, []bool{false, true, false}},
		{"one with all its tokens waits for its end", streaming(50*ms, 11), 1500 * ms, []bool{false, false, false}},
		{"one that must end too late", streaming(50*ms, 1), 1001 * ms, []bool{false, true, true}},
	} {
		for i, limit := range limits {
			if got := limit.Overdue(&row.sample, row.now); got != row.want[i] {
				t.Errorf("%s: overdue for %s is %t, want %t", row.name, limit.Metric, got, row.want[i])
			}
		}
	}
}
