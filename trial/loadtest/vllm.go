package loadtest

import (
	"cmp"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// Meta is what all results of one command have in common.
type Meta struct {
	Burstiness float64
	Metadata   map[string]string
	Detailed   bool // list the single requests too
}

// Check finds keys of the metadata that the result has already.
func (m Meta) Check(b *Bench) error {
	_, err := m.result(b, Result{})
	return err
}

// result is one run under the names of vllm bench serve.
func (m Meta) result(b *Bench, r Result) (bench.VLLMResult, error) {
	backend := "openai"
	if b.Client.Endpoint == workload.Chat {
		backend = "openai-chat"
	}
	var details []bench.Sample
	if m.Detailed {
		details = r.samples
	}
	measured := r.Measurement
	if r.Measurement.Queue.N > 0 && len(r.samples) > 0 { // vLLM's latencies leave out the time that a request waits in the client
		from := bench.WithoutQueue(r.samples)
		measured = bench.Measure(bench.Run{Samples: from, Series: r.Measurement.Series, Lateness: r.Measurement.Lateness}, r.scope)
		measured.Queue = r.Measurement.Queue
		if m.Detailed {
			details = from
		}
	}
	return bench.NewVLLMResult(measured, bench.VLLMMeta{
		Date: time.Now(), Backend: backend, Model: b.Client.Model, Prompts: r.planned, Rate: r.Rate,
		Burstiness: m.Burstiness, MaxConcurrency: cmp.Or(r.Streams, b.Client.MaxInFlight), Metadata: m.Metadata,
		Workload: b.workload(), Seed: b.Load.Seed, Natural: b.Client.Natural,
	}, details)
}
