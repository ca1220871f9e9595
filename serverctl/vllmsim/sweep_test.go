package vllmsim

import (
	"encoding/csv"
	"math"
	"os"
	"slices"
	"strconv"
	"testing"
)

// traceRequest is one row of the calibrated trace: 300 requests of 60 conversations, arrivals at 1 request/s.
type traceRequest struct {
	due                               float64
	conversation, starter             int
	starterTokens, prompt, output, id int
}

func readCSV(t *testing.T, name string) [][]string {
	t.Helper()
	f, err := os.Open("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return rows[1:]
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	x, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func readTrace(t *testing.T) []traceRequest {
	t.Helper()
	var trace []traceRequest
	for _, row := range readCSV(t, "trace_h200.csv") {
		n := func(i int) int { return int(number(t, row[i])) }
		trace = append(trace, traceRequest{
			due: number(t, row[1]), conversation: n(2), starter: n(4), starterTokens: n(5), prompt: n(6), output: n(7), id: n(0),
		})
	}
	return trace
}

// hashes gives the prompt's blocks: the starter's own ones first, then those of the conversation.
func (q traceRequest) hashes() []uint64 {
	var hs []uint64
	for i := range q.prompt / blockSize {
		if (i+1)*blockSize <= q.starterTokens {
			hs = append(hs, mix(mix(1, uint64(q.starter)), uint64(i)))
		} else {
			hs = append(hs, mix(mix(2, uint64(q.conversation)), uint64(i)))
		}
	}
	return hs
}

// replay drives the engine with the trace at a rate and returns the requests with the times at which they were sent.
func replay(e *Engine, trace []traceRequest, rate float64) ([]*Request, []float64) {
	var reqs []*Request
	var sent []float64
	for _, q := range trace {
		reqs = append(reqs, &Request{Prompt: q.prompt, Output: q.output, Hashes: q.hashes(), Salt: uint64(q.id) + 1})
		sent = append(sent, q.due/rate)
	}
	before := e.Profile.Latency.BeforeScheduling / 1000
	now, next := 0.0, 0
	for next < len(reqs) || !e.Idle() {
		for next < len(reqs) && sent[next]+before <= now {
			e.Submit(reqs[next])
			next++
		}
		if e.Idle() {
			now = sent[next] + before
			continue
		}
		now = e.Step(now)
	}
	return reqs, sent
}

func p99(xs []float64) float64 {
	slices.Sort(xs)
	h := 0.99 * float64(len(xs)-1)
	i := int(h)
	if i+1 >= len(xs) {
		return xs[i]
	}
	return xs[i] + (h-float64(i))*(xs[i+1]-xs[i])
}

func figures(e *Engine, reqs []*Request, sent []float64) map[string]float64 {
	var ttft, tpot []float64
	for i, r := range reqs {
		ttft = append(ttft, (r.First-sent[i])*1000+e.Profile.Latency.AfterStep)
		tpot = append(tpot, (r.Last-r.First)*1000/float64(r.Output-1))
	}
	return map[string]float64{"ttft_p99_ms": p99(ttft), "tpot_p99_ms": p99(tpot)}
}

// The seven manual configurations of the H200 sweep, one server each: ten warm-up requests, then twelve rising rates with
// the cache carried over. The calibrated model's own figures are the reference; the measured ones stand beside them.
func TestEngineReproducesTheCalibratedSweep(t *testing.T) {
	p, err := LoadProfile("h200-llama70b-fp8")
	if err != nil {
		t.Fatal(err)
	}
	configs := map[string]Options{
		"phase1-baseline-rerun": {GPUMemoryUtilization: 0.9, MaxNumSeqs: 1024, MaxNumBatchedTokens: 8192},
		"phase1-mem095":         {GPUMemoryUtilization: 0.95, MaxNumSeqs: 1024, MaxNumBatchedTokens: 8192},
		"phase1-batch16k":       {GPUMemoryUtilization: 0.9, MaxNumSeqs: 1024, MaxNumBatchedTokens: 16384},
		"phase1-seqs128":        {GPUMemoryUtilization: 0.9, MaxNumSeqs: 128, MaxNumBatchedTokens: 8192},
		"phase1-moderate":       {GPUMemoryUtilization: 0.95, MaxNumSeqs: 128, MaxNumBatchedTokens: 16384},
		"phase1-aggressive":     {GPUMemoryUtilization: 0.95, MaxNumSeqs: 256, MaxNumBatchedTokens: 32768},
	}
	trace := readTrace(t)
	reference, observed := map[string]float64{}, map[string]float64{}
	for _, row := range readCSV(t, "sweep_h200.csv") {
		key := row[0] + " " + row[1] + " " + row[2]
		observed[key], reference[key] = number(t, row[3]), number(t, row[4])
	}
	var errors []float64
	for name, o := range configs {
		o.MaxModelLen = 16384
		e, err := NewEngine(p, o)
		if err != nil {
			t.Fatal(err)
		}
		replay(e, trace[:10], 0.5)
		for _, rate := range []float64{0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5} {
			reqs, sent := replay(e, trace, rate)
			for metric, got := range figures(e, reqs, sent) {
				key := name + " " + strconv.FormatFloat(rate, 'f', -1, 64) + " " + metric
				off := math.Abs(got/reference[key] - 1)
				errors = append(errors, off)
				t.Logf("%-45s got %9.1f, calibrated model %9.1f, measured %9.1f", key, got, reference[key], observed[key])
			}
		}
	}
	slices.Sort(errors)
	if median, p90 := errors[len(errors)/2], errors[len(errors)*9/10]; median > 0.01 || p90 > 0.05 {
		t.Errorf("differs from the calibrated model by %.1f %% in the median and %.1f %% at p90, want at most 1 and 5", 100*median, 100*p90)
	}
}
