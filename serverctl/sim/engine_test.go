package sim

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// randomLoad returns a random engine and requests that share prefixes. The cache is so small that it overflows.
func randomLoad(t *testing.T, seed uint64) (*Engine, []*Request, []float64) {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 1))
	p := *profile(t, "small-fast")
	p.Memory.FixedGiB = 12.5 + rng.Float64()*0.8 // a KV cache of a few thousand tokens
	o := p.Defaults
	o.MaxModelLen = 1500
	o.MaxNumSeqs = 1 + rng.IntN(40)
	o.MaxNumBatchedTokens = o.MaxNumSeqs + rng.IntN(2000)
	o.NoPrefixCaching = rng.IntN(4) == 0
	e, err := NewEngine(&p, o)
	if err != nil {
		t.Fatal(err)
	}
	var reqs []*Request
	var due []float64
	at := 0.0
	for i := range 200 {
		ids := make([]int32, 1+rng.IntN(900))
		starter := rng.Int32N(5)
		for j := range ids {
			ids[j] = starter*10000 + int32(j)
		}
		if n := len(ids) / 2; rng.IntN(2) == 0 {
			for j := n; j < len(ids); j++ {
				ids[j] = int32(i)
			}
		}
		at += rng.ExpFloat64() * 0.01
		reqs = append(reqs, &Request{Prompt: len(ids), Output: 1 + rng.IntN(500), Hashes: HashBlocks(ids), Salt: uint64(i + 1)})
		due = append(due, at)
	}
	return e, reqs, due
}

// checkInvariants checks what must be true of an engine after every step.
func checkInvariants(t *testing.T, e *Engine) {
	t.Helper()
	held := make(map[int32]int32)
	for _, r := range e.running {
		if r.computed > len(r.blocks)*BlockSize {
			t.Fatalf("a request has %d tokens computed in %d blocks", r.computed, len(r.blocks))
		}
		for _, b := range r.blocks {
			held[b]++
		}
	}
	for b, refs := range e.kv.pool.refs {
		if held[int32(b)] != refs {
			t.Fatalf("block %d is held by %d requests, but its count is %d", b, held[int32(b)], refs)
		}
	}
	if e.kv.pool.free != e.kv.pool.total()-len(held) {
		t.Fatalf("%d blocks are free, want %d", e.kv.pool.free, e.kv.pool.total()-len(held))
	}
	for hash, b := range e.kv.pool.byHash {
		if e.kv.pool.hash[b] != hash {
			t.Fatalf("block %d is found under a hash that it does not have", b)
		}
	}
}

func drive(t *testing.T, e *Engine, reqs []*Request, due []float64, each func(before, after float64)) {
	t.Helper()
	now, next := 0.0, 0
	for next < len(reqs) || !e.Idle() {
		for next < len(reqs) && due[next] <= now {
			e.Submit(reqs[next])
			next++
		}
		if e.Idle() {
			now = due[next]
			continue
		}
		then := e.Step(now)
		if then <= now {
			t.Fatalf("a step at %g s did nothing with %d running and %d waiting", now, e.Running(), e.Waiting())
		}
		each(now, then)
		now = then
	}
}

// The test drives random engines with random loads. Some engines are overloaded or forced to preempt. Every request
// must get exactly its tokens, every step must keep the limits, and no block may be lost. The same seed must give the
// same times.
func TestEngineKeepsItsLimitsAndLosesNothing(t *testing.T) {
	preempted := 0
	for seed := range uint64(6) {
		e, reqs, due := randomLoad(t, seed)
		steps := 0
		drive(t, e, reqs, due, func(float64, float64) {
			if steps++; steps%10 == 0 {
				checkInvariants(t, e)
			}
			if e.Running() > e.Options.MaxNumSeqs {
				t.Fatalf("seed %d: %d requests run, want at most %d", seed, e.Running(), e.Options.MaxNumSeqs)
			}
		})
		for i, r := range reqs {
			if r.Tokens != r.Output || r.First <= due[i] || r.Last < r.First {
				t.Fatalf("seed %d: request %d has %d of %d tokens, first at %g, last at %g, due %g", seed, i, r.Tokens, r.Output, r.First, r.Last, due[i])
			}
		}
		if e.KVUsage() != 0 || !e.ResetCache() {
			t.Fatalf("seed %d: blocks are held although nothing runs", seed)
		}
		preempted += e.Totals.Preemptions

		again, reqs2, due2 := randomLoad(t, seed)
		drive(t, again, reqs2, due2, func(float64, float64) {})
		for i := range reqs {
			if reqs[i].Last != reqs2[i].Last || reqs[i].Cached != reqs2[i].Cached {
				t.Fatalf("seed %d: request %d differs between two equal runs", seed, i)
			}
		}
	}
	if preempted == 0 {
		t.Error("no load made the engine preempt, so the test did not cover preemption")
	}
}

func TestPrefixCache(t *testing.T) {
	p := profile(t, "small-fast")
	ids := make([]int32, 320)
	for i := range ids {
		ids[i] = int32(i)
	}
	cached := func(o Options, second []int32, between func(*Engine)) int {
		e, err := NewEngine(p, o)
		if err != nil {
			t.Fatal(err)
		}
		run := func(ids []int32) *Request {
			r := &Request{Prompt: len(ids), Output: 5, Hashes: HashBlocks(ids), Salt: 1}
			drive(t, e, []*Request{r}, []float64{0}, func(float64, float64) {})
			return r
		}
		run(ids)
		between(e)
		return run(second).Cached
	}
	nothing := func(*Engine) {}
	o := p.Defaults
	off := o
	off.NoPrefixCaching = true
	other := append([]int32{7}, ids[1:]...)
	for _, row := range []struct {
		name string
		got  int
		want int
	}{
		{"the same prompt hits all full blocks but the last token", cached(o, ids, nothing), 304},
		{"a longer prompt hits the whole shorter one", cached(o, append(ids[:320:320], 1, 2, 3), nothing), 320},
		{"another first token hits nothing", cached(o, other, nothing), 0},
		{"a reset empties the cache", cached(o, ids, func(e *Engine) { e.ResetCache() }), 0},
		{"caching switched off hits nothing", cached(off, ids, nothing), 0},
	} {
		if row.got != row.want {
			t.Errorf("%s: %d tokens cached, want %d", row.name, row.got, row.want)
		}
	}
}

func TestResetCacheIsRefusedWhileBlocksAreHeld(t *testing.T) {
	p := profile(t, "small-fast")
	e, err := NewEngine(p, p.Defaults)
	if err != nil {
		t.Fatal(err)
	}
	r := &Request{Prompt: 100, Output: 10}
	e.Submit(r)
	e.Step(0)
	if e.ResetCache() {
		t.Error("ResetCache succeeds while a request runs")
	}
	e.Abort(r)
	if !e.ResetCache() || !e.Idle() {
		t.Error("an aborted request still holds blocks")
	}
}

// smallCache returns an engine whose cache has the given number of blocks.
func smallCache(t *testing.T, blocks int) *Engine {
	t.Helper()
	p := *profile(t, "small-fast")
	o := p.Defaults
	o.MaxModelLen = blocks * BlockSize
	p.Memory.FixedGiB += p.KVGiB(o) - (float64(blocks)+0.5)*BlockSize*p.Memory.KVBytesPerToken/gib
	e, err := NewEngine(&p, o)
	if err != nil {
		t.Fatal(err)
	}
	if e.kv.pool.total() != blocks {
		t.Fatalf("%d blocks, want %d", e.kv.pool.total(), blocks)
	}
	return e
}

// prompt returns a request. Requests of the same kind share their first tokens; the parameter common says how many.
func prompt(kind int32, common, rest, output int) *Request {
	ids := make([]int32, common+rest)
	for i := range ids {
		ids[i] = kind*1000 + int32(i)
		if i >= common {
			ids[i] += 500_000
		}
	}
	return &Request{Prompt: len(ids), Output: output, Hashes: HashBlocks(ids), Salt: uint64(kind)}
}

// A request that does not fit waits. It must not hold its cached blocks, or change the order in which blocks are
// reused. As in vLLM, each lookup of a waiting request counts.
func TestARequestThatDoesNotFitLeavesTheCacheAlone(t *testing.T) {
	e := smallCache(t, 40)
	drive(t, e, []*Request{prompt(1, 160, 0, 2)}, []float64{0}, func(float64, float64) {})
	e.Submit(prompt(2, 400, 0, 100))
	now := e.Step(0)
	before := viewOf(e, nil)
	e.Submit(prompt(1, 160, 300, 10)) // 10 of its blocks are cached, 19 are not, and 15 are free
	for range 3 {
		now = e.Step(now)
		after := viewOf(e, nil)
		taken := len(before.free) - len(after.free)
		if e.Waiting() != 1 || taken < 0 || !slices.Equal(before.free[taken:], after.free) {
			t.Fatalf("%d requests wait; the free blocks were %v and are %v", e.Waiting(), before.free, after.free)
		}
	}
	if got, want := e.Totals.PrefixQueries-before.totals.PrefixQueries, 3*460; got != want {
		t.Errorf("%d tokens were looked up in three steps, want %d", got, want)
	}
	if got, want := e.Totals.PrefixHits-before.totals.PrefixHits, 3*160; got != want {
		t.Errorf("%d looked-up tokens were found, want %d", got, want)
	}
}

// When a preempted request comes back, the blocks that it finds do not count as hits of the prefix cache.
func TestPreemptedRequestsCountOnce(t *testing.T) {
	e := smallCache(t, 40)
	reqs := []*Request{prompt(1, 0, 200, 200), prompt(2, 0, 200, 200)}
	reqs[1].Hashes = HashBlocks([]int32{7}) // no block in common with the first request
	drive(t, e, reqs, []float64{0, 0}, func(float64, float64) {})
	if e.Totals.Preemptions == 0 {
		t.Fatal("no request was preempted")
	}
	if e.Totals.PrefixQueries != 400 || e.Totals.PrefixHits != 0 {
		t.Errorf("%d tokens looked up and %d found, want 400 and 0", e.Totals.PrefixQueries, e.Totals.PrefixHits)
	}
}
