package vllm

import (
	"runtime"
	"slices"
	"testing"
	"time"

	"vllmtuner/serverctl/sim"
)

// A waiting sequence takes memory for the tokens that have come, and not for all tokens that it will get.
func TestUpdatesTakeNoMemoryAhead(t *testing.T) {
	p := profile(t, "small-fast")
	engine, err := sim.NewEngine(p, p.Defaults)
	if err != nil {
		t.Fatal(err)
	}
	l := newLive(engine)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	var sequences []*sequence
	for range 1000 {
		sequences = append(sequences, &sequence{request: &sim.Request{Prompt: 1, Output: 100_000}, group: &group{}})
	}
	updates := l.submit(sequences)
	runtime.ReadMemStats(&after)
	if used := after.TotalAlloc - before.TotalAlloc; used > 10<<20 {
		t.Errorf("1,000 requests take %d bytes before their first token", used)
	}
	l.abort(sequences)
	runtime.KeepAlive(updates)
}

// The method put never waits for the handler. The method take returns the updates in their order.
func TestUpdatesComeInOrder(t *testing.T) {
	const all = 10_000
	u := &updates{ready: make(chan struct{}, 1)}
	u.put(update{tokens: 0})
	u.put(update{tokens: 1}) // the test has taken neither update yet, and put has not waited
	go func() {
		for i := 2; i < all; i++ {
			u.put(update{tokens: i})
		}
	}()
	var batch []update
	var got []int
	for len(got) < all {
		select {
		case <-u.ready:
		case <-time.After(time.Minute):
			t.Fatalf("%d of %d updates came, and then no wake-up", len(got), all)
		}
		batch = u.take(batch)
		for _, one := range batch {
			got = append(got, one.tokens)
		}
	}
	if !slices.IsSorted(got) || got[all-1] != all-1 {
		t.Error("the updates came in another order")
	}
}
