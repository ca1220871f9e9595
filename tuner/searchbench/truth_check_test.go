package searchbench

import (
	"fmt"
	"math"
	"testing"
	"time"

	"vllmtuner/realtime"
	"vllmtuner/tuner/searchbench/otherengine"
	"vllmtuner/tuner/space"
)

// A server that only prefills equal prompts is an M/D/1 queue.
func TestTheTruthOfAQueueIsKnown(t *testing.T) {
	realtime.Only(t, "measures a capacity of the long run")
	const service, limit = 0.05, 0.25
	machine := otherengine.Machine{
		Name: "queue", Memory: 1e6, Decode: 1e6, Prefill: 1000 / service, Chunk: 0, Share: 1, NoCache: true,
		Seqs: 256, Batch: 2048, MaxModelLen: 8192,
	}
	file := fmt.Sprintf(header+flags+limits, "8192", 0.5, 8, 512, int(1000*limit), 1000) +
		"workload: {kind: random, input_tokens: 1000, output_tokens: 1}\n"
	w := otherWorld(machine, file, slowGrid)
	got, err := w.truth(space.Point{}, 5, 0, effort{1000, 10 * time.Second, 8, 16, 0.012, 0, 0})
	if err != nil {
		t.Fatal(err)
	}
	want := queueCapacity(service, limit)
	if math.Abs(math.Log(got.Capacity/want)) > 3*got.StdErr+0.005 || got.StdErr > 0.02 || got.Limit != "p99 TTFT" {
		t.Errorf("truth = %.4g ± %.2g %% by %s, want %.4g", got.Capacity, 100*got.StdErr, got.Limit, want)
	}
}

// queueCapacity returns the rate at which the share goal of the customers of an M/D/1 queue stays longer than the
// limit.
func queueCapacity(service, limit float64) float64 {
	low, high := 0.0, 1/service
	for range 60 {
		rate := (low + high) / 2
		within := 0.0 // P(wait <= limit - service), by Erlang (1909)
		for k := 0; float64(k)*service <= limit-service; k++ {
			x := rate * (float64(k)*service - (limit - service))
			term := math.Exp(-x)
			for i := 1; i <= k; i++ {
				term *= x / float64(i)
			}
			within += term
		}
		if 1-(1-rate*service)*within < goal {
			low = rate
		} else {
			high = rate
		}
	}
	return low
}

func TestEveryWorldOpens(t *testing.T) {
	worlds, err := namedWorlds()
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(4) {
		w, err := randomWorld(seed)
		if err != nil {
			t.Fatal(err)
		}
		worlds = append(worlds, w)
	}
	for _, w := range worlds {
		if _, err := w.open(1); err != nil {
			t.Errorf("%s: %v", w.name, err)
		}
	}
}
