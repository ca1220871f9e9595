//go:build vllm && linux

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"vllmtuner/bench"
	"vllmtuner/bench/workload"
	"vllmtuner/trial/vllmserve"
)

// make bench-parity sets these variables. Without BENCH_PARITY the comparison is skipped.
const (
	parityVariable        = "BENCH_PARITY"         // names the file for the tables
	parityRepeatsVariable = "BENCH_PARITY_REPEATS" // replaces parityRepeats
)

// parityRepeats is the default number of repeats of each tool in each case.
const parityRepeats = 5

// A parityCase is one load that both tools send to one server.
type parityCase struct {
	server   string // realServer or simulatedServer
	endpoint string
	streams  int     // streams of the closed loop; in the open loop, about the number of requests in flight
	rate     float64 // requests per second of the open loop, at constant gaps; 0 means a closed loop
	requests int
}

// parityCases has no rate that is a whole number. With such a rate, a request would be due at each full second, and
// chance would decide which of vLLM's one-second buckets counts it.
var parityCases = []parityCase{
	{server: realServer, endpoint: workload.Completions, streams: 4, requests: 48},
	{server: realServer, endpoint: workload.Completions, streams: 8, requests: 80},
	{server: realServer, endpoint: workload.Chat, streams: 8, requests: 80},
	{server: realServer, endpoint: workload.Completions, streams: 8, rate: 23.7, requests: 72},
	{server: simulatedServer, endpoint: workload.Completions, streams: 4, requests: 48},
	{server: simulatedServer, endpoint: workload.Completions, streams: 8, requests: 80},
	{server: simulatedServer, endpoint: workload.Chat, streams: 8, requests: 80},
	{server: simulatedServer, endpoint: workload.Completions, streams: 8, rate: 23.7, requests: 72},
	{server: simulatedServer, endpoint: workload.Completions, streams: 64, requests: 256},
	{server: simulatedServer, endpoint: workload.Completions, streams: 64, rate: 87.3, requests: 256},
}

const (
	realServer      = "vLLM on CPU"
	simulatedServer = "tuner sim serve"
)

// String describes the load.
func (c parityCase) String() string {
	if c.rate > 0 {
		return fmt.Sprintf("%s, %s, %d requests at %g req/s, about %d in flight", c.server, c.endpoint, c.requests, c.rate, c.streams)
	}
	return fmt.Sprintf("%s, %s, %d requests in %d streams", c.server, c.endpoint, c.requests, c.streams)
}

// TestBenchParity sends the same prompts at the same times with tuner bench and with vllm bench serve, in turns. Both
// tools send them to real vLLM and to the simulated server. The test compares every field that both tools write.
func TestBenchParity(t *testing.T) {
	file := os.Getenv(parityVariable)
	if file == "" {
		t.Skip("the comparison needs a quiet machine and a quarter of an hour for each version: make bench-parity")
	}
	repeats := parityRepeats
	if text := os.Getenv(parityRepeatsVariable); text != "" {
		var err error
		if repeats, err = strconv.Atoi(text); err != nil || repeats < 1 {
			t.Fatalf("%s=%s: want a number of repeats of at least 1", parityRepeatsVariable, text)
		}
	}
	for _, version := range []string{"0.14.1", "0.32.0"} {
		t.Run(version, func(t *testing.T) {
			p := &parity{rig: openRig(t, version), repeats: repeats, dir: t.ArtifactDir()}
			p.drawPrompts(t)
			busy, all := machineTime(t)
			var url, served string
			for _, c := range parityCases {
				if c.server != served {
					url, served = p.start(t, c.server), c.server
					p.ours(t, url, c) // warms up the server, which is slower the first time
				}
				p.compare(t, url, c)
			}
			busyAfter, allAfter := machineTime(t)
			p.write(t, file, float64(busyAfter-busy)/float64(allAfter-all))
		})
	}
}

// A parity is the comparison with one version of vLLM.
type parity struct {
	rig     *rig
	repeats int
	dir     string // directory with the prompts, results and logs
	server  *child // real vLLM; nil before its start
	cases   []comparedCase
}

// parityWords are words that are one token each, with and without a leading space, for the rig's model and for the
// simulated server. So vLLM 0.14.1, which counts a prompt's tokens with the model's tokenizer, gets the same number as
// the server.
var parityWords = strings.Fields("self the name data file path line code key list type time open read text call from with not and for")

// shortAnswer is the length in tokens of two thirds of the answers.
const shortAnswer = 32

// drawPrompts writes the file of requests that tuner bench reads. No two prompts begin with the same words.
func (p *parity) drawPrompts(t *testing.T) {
	t.Helper()
	const rows, minWords, maxWords, longAnswer = 256, 30, 90, 64
	draw := rand.New(rand.NewPCG(1, 1))
	var text bytes.Buffer
	lines := json.NewEncoder(&text)
	for range rows {
		words := make([]string, minWords+draw.IntN(maxWords-minWords+1))
		for i := range words {
			words[i] = parityWords[draw.IntN(len(parityWords))]
		}
		tokens := shortAnswer
		if draw.IntN(3) == 0 { // only a third of the answers are long; with one half, a median could lie between the two lengths
			tokens = longAnswer
		}
		row := map[string]any{"prompt": strings.Join(words, " "), "output_tokens": tokens}
		must(t, lines.Encode(row))
	}
	must(t, os.WriteFile(p.prompts(), text.Bytes(), 0o600))
}

func (p *parity) prompts() string { return filepath.Join(p.dir, "prompts.jsonl") }

// start stops the previous server and starts another one, without a prefix cache. With a cache, each run would find the
// prompts of the previous run in it.
func (p *parity) start(t *testing.T, server string) (url string) {
	t.Helper()
	const noCache = "--no-enable-prefix-caching"
	if server == simulatedServer {
		if p.server != nil {
			p.server.stop()
		}
		return startSim(t, noCache)
	}
	url, p.server = p.rig.serve(t, filepath.Join(p.dir, "vllm.log"), []string{"--served-model-name", parityModel,
		"--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "2048", "--enforce-eager", "--hf-overrides", parityLayers, noCache})
	return url
}

// parityLayers makes a step of the model take about 5 ms instead of 1 ms. With the model's own two layers, eight
// streams keep both cores of a small machine busy. Then the tool that uses more CPU would slow the server, and the
// figures would differ for that reason.
const parityLayers = `{"num_hidden_layers": 24}`

// parityModel is the name of the model on both servers.
const parityModel = "my/model"

// compare measures a case with both tools in turns.
func (p *parity) compare(t *testing.T, url string, c parityCase) {
	t.Helper()
	compared := comparedCase{parityCase: c, version: p.rig.version}
	for repeat := range p.repeats {
		compared.ours = append(compared.ours, p.ours(t, url, c))
		compared.theirs = append(compared.theirs, p.theirs(t, url, c, repeat))
	}
	p.cases = append(p.cases, compared)
	for _, f := range compared.fields() {
		if f.verdict == isOut {
			t.Errorf("%s: %s", c, f)
		}
	}
}

// paritySeed decides the order in which tuner bench draws the rows of the file.
const paritySeed = 1

// parityRules fits both installed versions. Both count the chunk that names the role as the first token of a chat
// (async_request_openai_chat_completions in vllm/benchmarks/lib/endpoint_request_func.py). Only 0.14.1 counts the usage
// chunk as the end of the answer, but this chunk comes only microseconds after the last token.
const parityRules = string(bench.Rules0141)

// parityGoodput is an E2E limit. In eight simulated streams, short answers keep the limit and long answers break it.
const parityGoodput = "e2el:300"

// ours sends the load of a case with tuner bench.
func (p *parity) ours(t *testing.T, url string, c parityCase) parityResult {
	t.Helper()
	args := []string{"bench", "--url", url, "--endpoint", c.endpoint, "--workload", "jsonl", "--path", p.prompts(),
		"--seed", fmt.Sprint(paritySeed), "--requests", fmt.Sprint(c.requests), "--rules", parityRules, "--quiet", "-o", "json",
		"--goodput", parityGoodput}
	if c.rate > 0 {
		args = append(args, "--rate", fmt.Sprint(c.rate), "--arrivals", constant, "--rescale")
	} else {
		args = append(args, "--concurrency", fmt.Sprint(c.streams), "--lead-in", "0s", "--no-run-out")
	}
	return readParityResult(t, "tuner bench", []byte(command(t, args...)))
}

// arrivals returns the requests of a case in the order in which tuner bench draws them from the file. They have no due
// times, because each tool has its own options for the gaps.
func (p *parity) arrivals(t *testing.T, c parityCase) []workload.Arrival {
	t.Helper()
	source, err := workload.Open(workload.Spec{Kind: "jsonl", Path: p.prompts(), Endpoint: c.endpoint}, paritySeed)
	must(t, err)
	arrivals := make([]workload.Arrival, c.requests)
	for i := range arrivals {
		arrivals[i] = workload.Arrival{Due: workload.Asap, Phase: workload.Window, Index: i, Request: source.Request(workload.WindowStream, i)}
	}
	return arrivals
}

// theirs sends the load of a case with vllm bench serve.
func (p *parity) theirs(t *testing.T, url string, c parityCase, repeat int) parityResult {
	t.Helper()
	load := &vllmserve.Load{
		Command: []string{filepath.Join(p.rig.dir, "venv/bin/vllm"), "bench", "serve"}, Env: p.rig.env(), Dir: p.dir,
		Tokenizer: filepath.Join(p.rig.dir, "tiny-qwen2"), Limit: 2 * time.Minute,
		Client: &bench.Client{URL: url, Model: parityModel, Endpoint: c.endpoint},
	}
	dir := filepath.Join(p.dir, fmt.Sprintf("case-%d-repeat-%d", len(p.cases)+1, repeat+1))
	must(t, os.Mkdir(dir, 0o700))
	options := []string{"--goodput", parityGoodput}
	if c.rate > 0 { // vllm takes the last value of an option that is given twice
		options = append(options, "--request-rate", fmt.Sprint(c.rate), "--burstiness", "inf")
	} else {
		options = append(options, "--max-concurrency", fmt.Sprint(c.streams))
	}
	path, err := load.Call(t.Context(), dir, p.arrivals(t, c), options...)
	must(t, err)
	text, err := os.ReadFile(path)
	must(t, err)
	return readParityResult(t, "vllm bench serve", text)
}

// A parityResult maps vLLM's names of the figures to their values in one run.
type parityResult map[string]float64

func readParityResult(t *testing.T, tool string, text []byte) parityResult {
	t.Helper()
	// Python writes the burstiness of constant gaps as Infinity, which JSON does not allow.
	text = bytes.ReplaceAll(text, []byte(": Infinity"), []byte(": null"))
	var all map[string]any
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatalf("%s: %v\n%.2000s", tool, err, text)
	}
	result := parityResult{}
	for key, value := range all {
		if number, ok := value.(float64); ok {
			result[key] = number
		}
	}
	return result
}
