package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/urfave/cli/v2"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
)

func benchCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:  "bench",
		Usage: "send a load to a running server and print what vllm bench serve prints",
		Description: `Open loop, Poisson arrivals, latencies from when a request was due. Only
requests that are due in the window count; load goes on around it. An API key
is taken from OPENAI_API_KEY.

Examples:
  tuner bench --url http://127.0.0.1:8000 --workload random --rate 2
  tuner bench --url http://127.0.0.1:8000 --workload sharegpt \
              --path ShareGPT.json --rate 1 --rate 2 --rate 4`,
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "url", Usage: "base `URL` of the server (required)"},
			&cli.StringFlag{Name: "model", Usage: "served model `name` (default: the server's first)"},
			&cli.StringFlag{Name: "workload", Value: "random", Usage: "`kind`: " + strings.Join(workload.Kinds, ", ")},
			&cli.StringFlag{Name: "path", Usage: "dataset `file` of sharegpt and jsonl"},
			&cli.StringFlag{Name: "endpoint", Value: workload.Completions, Usage: "completions or chat"},
			&cli.IntFlag{Name: "input-tokens", Usage: "mean prompt length of random"},
			&cli.IntFlag{Name: "output-tokens", Usage: "answer length: mean of random, or every one of a dataset"},
			&cli.Float64Flag{Name: "range-ratio", Usage: "spread of random's lengths, 0 to 1"},
			&cli.IntFlag{Name: "vocab-size", Usage: "token ids stay below it"},
			&cli.Float64SliceFlag{Name: "rate", Usage: "requests per second (required); several are measured in turn"},
			&cli.IntFlag{Name: "requests", Value: 300, Usage: "at least so many counted requests"},
			&cli.Float64Flag{Name: "seconds", Usage: "and a window of at least so many seconds"},
			&cli.DurationFlag{Name: "lead-in", Value: 5 * time.Second, Usage: "load before the window, not counted"},
			&cli.Uint64Flag{Name: "seed", Value: 1, Usage: "seed of requests and arrivals"},
			formatFlag(),
		},
		Action: func(c *cli.Context) error {
			ctx, cancel := orderly(c.Context, finish)
			defer cancel()
			return benchAction(ctx, c)
		},
	}
}

// Beyond these no server is meant: a typo would exhaust this machine first.
const (
	mostRate   = 100_000 // requests per second
	mostTokens = 10_000_000
)

func benchAction(ctx context.Context, c *cli.Context) error {
	format, err := formatOf(c)
	if err != nil {
		return err
	}
	if c.String("url") == "" || len(c.Float64Slice("rate")) == 0 {
		return usage("bench needs --url and --rate; see `tuner bench --help`")
	}
	for _, rate := range c.Float64Slice("rate") {
		if !(rate > 0 && rate <= mostRate) {
			return usage("--rate %g: must be above 0 and at most %d", rate, mostRate)
		}
	}
	if c.Int("requests") < 1 || c.Float64("seconds") < 0 || c.Int("input-tokens") > mostTokens || c.Int("output-tokens") > mostTokens {
		return usage("--requests must be at least 1, --seconds not negative, and lengths at most %d tokens", mostTokens)
	}
	source, err := workload.Open(workload.Spec{
		Kind: c.String("workload"), Path: c.String("path"), Endpoint: c.String("endpoint"), InputTokens: c.Int("input-tokens"),
		OutputTokens: c.Int("output-tokens"), RangeRatio: c.Float64("range-ratio"), VocabSize: c.Int("vocab-size"),
	}, c.Uint64("seed"))
	if err != nil {
		return usageError{err}
	}
	client := &bench.Client{
		URL: c.String("url"), Model: c.String("model"), Endpoint: c.String("endpoint"),
		APIKey: bench.Secret(os.Getenv("OPENAI_API_KEY")), ITL: true,
	}
	if client.Model == "" {
		if client.Model, err = firstModel(ctx, client); err != nil {
			return err
		}
	}
	for _, rate := range c.Float64Slice("rate") {
		plan := workload.Plan{
			Source: source, Seed: c.Uint64("seed"), Rate: rate, LeadIn: c.Duration("lead-in"),
			Window: time.Duration(c.Float64("seconds") * float64(time.Second)), MinRequests: c.Int("requests"),
		}
		m, err := measure(ctx, client, plan)
		if err != nil {
			return err
		}
		if err := printMeasurement(c.App.Writer, m, format); err != nil {
			return err
		}
	}
	return nil
}

// measure sends one plan.
func measure(ctx context.Context, client *bench.Client, plan workload.Plan) (bench.Measurement, error) {
	n, window := plan.Counted()
	run, err := client.Run(ctx, plan.Schedule(), nil)
	if err != nil {
		return bench.Measurement{}, fmt.Errorf("%d requests at %g req/s: %w", n, plan.Rate, err)
	}
	m := bench.Measure(run.Samples, plan.Rate, plan.LeadIn, window)
	if m.Completed == 0 {
		return m, fmt.Errorf("all %d requests failed: %v", m.Requests, m.Failures)
	}
	return m, nil
}

// firstModel asks the server for the name of its model.
func firstModel(ctx context.Context, client *bench.Client) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(client.URL, "/")+"/v1/models", nil)
	if err != nil {
		return "", usage("--url: %v", err)
	}
	if client.APIKey != "" {
		req.Header.Set("Authorization", "Bearer "+string(client.APIKey))
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", fmt.Errorf("ask for the model's name: %w", err)
	}
	defer resp.Body.Close()
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || resp.StatusCode != http.StatusOK || len(list.Data) == 0 {
		return "", errors.Join(fmt.Errorf("%s/v1/models answers %s without a model; name it with --model", client.URL, resp.Status), err)
	}
	return list.Data[0].ID, nil
}

// printMeasurement writes the figures under the words of vllm bench serve.
func printMeasurement(w io.Writer, m bench.Measurement, format string) error {
	switch format {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(m)
	case "yaml":
		text, err := yaml.MarshalWithOptions(m, yaml.UseJSONMarshaler())
		if err != nil {
			return err
		}
		_, err = w.Write(text)
		return err
	}
	row := func(name, format string, v any) { fmt.Fprintf(w, "%-40s "+format+"\n", name, v) }
	fmt.Fprintf(w, "============ Serving Benchmark Result ============\n")
	row("Request rate configured (RPS):", "%.2f", m.Rate)
	row("Successful requests:", "%d", m.Completed)
	row("Failed requests:", "%d", m.Failed)
	for _, kind := range slices.Sorted(maps.Keys(m.Failures)) {
		row("  "+string(kind)+":", "%d", m.Failures[kind])
	}
	row("Window (s):", "%.2f", m.Window.Seconds())
	row("Total input tokens:", "%d", m.PromptTokens)
	row("Total generated tokens:", "%d", m.OutputTokens)
	row("Request throughput (req/s):", "%.2f", m.RequestThroughput)
	row("Output token throughput (tok/s):", "%.2f", m.OutputThroughput)
	row("Peak concurrent requests:", "%d", m.PeakInFlight)
	for _, s := range []struct {
		name  string
		stats bench.Stats
	}{{"TTFT", m.TTFT}, {"TPOT", m.TPOT}, {"ITL", m.ITL}, {"E2EL", m.E2E}, {"Send lag", m.SendLag}} {
		row("Mean "+s.name+" (ms):", "%.2f", s.stats.Mean)
		row("Median "+s.name+" (ms):", "%.2f", s.stats.P50)
		row("P99 "+s.name+" (ms):", "%.2f", s.stats.P99)
	}
	return nil
}
