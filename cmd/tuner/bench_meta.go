package main

import (
	"math"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

// A benchMeta is what all result objects of one command have in common.
type benchMeta struct {
	b          *benching
	burstiness float64
	metadata   map[string]string
	detailed   bool
}

func newBenchMeta(c *cli.Context, b *benching) (benchMeta, error) {
	burstiness := c.Float64("burstiness")
	if c.String("arrivals") == constant {
		burstiness = math.Inf(1)
	}
	m := benchMeta{b: b, burstiness: burstiness, metadata: map[string]string{}, detailed: c.Bool("detailed")}
	for _, word := range c.StringSlice("metadata") {
		key, value, ok := strings.Cut(word, "=")
		if !ok || key == "" {
			return m, usage("--metadata %s: write KEY=VALUE", word)
		}
		m.metadata[key] = value
	}
	// A key that is taken is found before the first run.
	if _, err := m.result(benchResult{}); err != nil {
		return m, usage("--metadata: %w", err)
	}
	return m, nil
}

// result is one run under vLLM's names.
func (m benchMeta) result(r benchResult) (bench.VLLMResult, error) {
	backend := "openai"
	if m.b.client.Endpoint == workload.Chat {
		backend = "openai-chat"
	}
	var details []bench.Sample
	if m.detailed {
		details = r.samples
	}
	most := r.concurrency
	if most == 0 {
		most = m.b.client.MaxInFlight
	}
	measured := r.m
	if r.m.Queue.N > 0 && len(r.samples) > 0 { // vLLM's latencies begin where the wait in the client ends
		from := bench.WithoutQueue(r.samples)
		measured = bench.Measure(bench.Run{Samples: from, Series: r.m.Series, Lateness: r.m.Lateness}, r.scope)
		measured.Queue = r.m.Queue
		if m.detailed {
			details = from
		}
	}
	return bench.NewVLLMResult(measured, bench.VLLMMeta{
		Date: time.Now(), Backend: backend, Model: m.b.client.Model, Prompts: r.planned, Rate: r.rate,
		Burstiness: m.burstiness, MaxConcurrency: most, Metadata: m.metadata,
		Workload: m.b.asked(), Seed: m.b.seed, Natural: m.b.client.Natural,
	}, details)
}
