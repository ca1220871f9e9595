package sim

import (
	"maps"
	"math/rand/v2"
	"reflect"
	"testing"

	"vllmtuner/realtime"
)

// A requestView is what callers see of a request after a load.
type requestView struct {
	first, last            float64
	tokens, chunks, cached int
}

// A view is what callers see of an engine, and the state of its cache.
type view struct {
	requests []requestView
	totals   Totals
	content  map[uint64]int32
	free     []int32 // free blocks in the order in which requests will take them
}

func viewOf(e *Engine, reqs []*Request) view {
	l := view{totals: e.Totals, content: maps.Clone(e.kv.pool.byHash)}
	for _, r := range reqs {
		l.requests = append(l.requests, requestView{r.First, r.Last, r.Tokens, r.Chunks, r.Cached})
	}
	anchor := int32(e.kv.pool.total())
	for b := e.kv.pool.next[anchor]; b != anchor; b = e.kv.pool.next[b] {
		l.free = append(l.free, b)
	}
	return l
}

// noisyLoad returns a load as randomLoad does, but with noise and with longer pauses between the requests.
func noisyLoad(t *testing.T, seed uint64) (*Engine, []*Request, []float64) {
	e, reqs, due := randomLoad(t, seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	e.Seed = seed
	e.Profile.Noise = Noise{Relative: rng.Float64() * 0.05, Jitter: rng.Float64(), Stall: 20, StallGap: 1}
	stretch := rng.Float64() * 30
	for i := range due {
		due[i] *= stretch
	}
	return e, reqs, due
}

func TestSpansAgreeWithTheLoopOverAllRequests(t *testing.T) {
	t.Parallel()
	compareSpans(t, 12)
}

func TestSpansAgreeForManySeeds(t *testing.T) {
	realtime.Only(t, "simulates 60 loads step by step")
	compareSpans(t, 60)
}

// compareSpans drives two engines with the same random loads. One uses spans, and the other visits every request in
// every step. The two engines must agree exactly in every time, count and block.
func compareSpans(t *testing.T, seeds uint64) {
	t.Helper()
	spans, preempted := 0, 0
	for seed := range seeds {
		fast, reqs, due := noisyLoad(t, seed)
		plain, reqs2, _ := noisyLoad(t, seed)
		plain.Each = true
		rng := rand.New(rand.NewPCG(seed, 3))
		now, next := 0.0, 0
		for next < len(reqs) || !fast.Idle() {
			for next < len(reqs) && due[next] <= now {
				fast.Submit(reqs[next])
				plain.Submit(reqs2[next])
				next++
			}
			if fast.Idle() {
				now = due[next]
				continue
			}
			then, want := fast.Step(now), plain.Step(now)
			if then != want || fast.Served != plain.Served || fast.KVUsage() != plain.KVUsage() || fast.Running() != plain.Running() {
				t.Fatalf("seed %d: a step at %g s ended at %g with %d requests served, want %g with %d", seed, now, then, fast.Served, want, plain.Served)
			}
			if fast.span.stepsDone > 0 {
				spans++
			}
			now = then
			switch rng.IntN(500) {
			case 0:
				if i := rng.IntN(len(reqs)); i < next {
					fast.Abort(reqs[i])
					plain.Abort(reqs2[i])
				}
			case 1:
				fast.InFlight()
				if got, want := viewOf(fast, reqs), viewOf(plain, reqs2); !reflect.DeepEqual(got, want) {
					t.Fatalf("seed %d: after %d steps the engines differ:\n%+v\n%+v", seed, fast.Totals.Steps, got.totals, want.totals)
				}
			}
		}
		if got, want := viewOf(fast, reqs), viewOf(plain, reqs2); !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: the engines differ:\n%+v\n%+v", seed, got.totals, want.totals)
		}
		checkInvariants(t, fast)
		preempted += fast.Totals.Preemptions
	}
	if spans < 1000 || preempted == 0 {
		t.Errorf("%d steps were in spans and %d requests were preempted, which is too few to test anything", spans, preempted)
	}
}

// BenchmarkEngine replays the calibrated trace at 2 requests/s.
func BenchmarkEngine(b *testing.B) {
	p, err := LoadProfile("h200-llama70b-fp8")
	if err != nil {
		b.Fatal(err)
	}
	o := p.Defaults
	o.MaxModelLen = 16384
	e, err := NewEngine(p, o)
	if err != nil {
		b.Fatal(err)
	}
	trace := readTrace(b)
	b.ReportAllocs()
	for b.Loop() {
		replay(e, trace, 2)
	}
	b.ReportMetric(float64(b.N*len(trace))/b.Elapsed().Seconds(), "requests/s")
	b.ReportMetric(float64(e.Totals.Steps)/b.Elapsed().Seconds(), "steps/s")
}
