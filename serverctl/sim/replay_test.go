package sim

import (
	"encoding/csv"
	"math"
	"os"
	"slices"
	"strconv"
	"testing"
)

// traceRequest is one row of the calibrated trace, which was fitted together with the H200 profile. The trace has 300
// requests of 60 conversations. The requests arrive at 1 request/s.
type traceRequest struct {
	due                               float64
	conversation, starter             int
	starterTokens, prompt, output, id int
	hashes                            []uint64
}

func readCSV(t testing.TB, name string) [][]string {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func number(t testing.TB, text string) float64 {
	t.Helper()
	x, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func readTrace(t testing.TB) []traceRequest {
	t.Helper()
	var trace []traceRequest
	for _, row := range readCSV(t, "testdata/trace_h200.csv")[1:] {
		n := func(i int) int { return int(number(t, row[i])) }
		q := traceRequest{
			due: number(t, row[1]), conversation: n(2), starter: n(4), starterTokens: n(5), prompt: n(6), output: n(7), id: n(0),
		}
		q.hashes = q.content()
		trace = append(trace, q)
	}
	return trace
}

// content returns the hashes of the prompt's blocks. The first blocks belong to the starter, a beginning that several
// conversations share. The other blocks belong to the conversation.
func (q traceRequest) content() []uint64 {
	var hs []uint64
	for i := range q.prompt / BlockSize {
		if (i+1)*BlockSize <= q.starterTokens {
			hs = append(hs, mix(mix(1, uint64(q.starter)), uint64(i)))
		} else {
			hs = append(hs, mix(mix(2, uint64(q.conversation)), uint64(i)))
		}
	}
	return hs
}

// served is what vllm bench serve records about one request, in seconds.
type served struct {
	sent, first, last float64
	output            int
}

func (r served) ttft() float64 { return 1000 * (r.first - r.sent) }

func (r served) tpot() float64 { return 1000 * (r.last - r.first) / float64(r.output-1) }

// replay sends the trace to the engine at a rate, as an open loop. It returns the requests and, if e.Each is set, the
// times between tokens in ms.
func replay(e *Engine, trace []traceRequest, rate float64) (records []served, gaps []float64) {
	before, after := e.Profile.Latency.BeforeScheduling/1000, e.Profile.Latency.AfterStep/1000
	reqs := make([]*Request, len(trace))
	last := make([]float64, len(trace))
	now, next := 0.0, 0
	for next < len(reqs) || !e.Idle() {
		for next < len(reqs) && trace[next].due/rate+before <= now {
			q := trace[next]
			reqs[next] = &Request{Prompt: q.prompt, Output: q.output, Hashes: q.hashes, Salt: uint64(q.id) + 1, Tag: next}
			e.Submit(reqs[next])
			next++
		}
		if e.Idle() {
			now = trace[next].due/rate + before
			continue
		}
		now = e.Step(now)
		for _, r := range e.Emitted {
			if e.Each && r.Chunks > 1 {
				gaps = append(gaps, 1000*(now-last[r.Tag]))
			}
			last[r.Tag] = now
		}
	}
	for i, r := range reqs {
		records = append(records, served{sent: trace[i].due / rate, first: r.First + after, last: r.Last + after, output: r.Output})
	}
	return records, gaps
}

// replayClosed keeps a number of requests (concurrency) in flight until n requests have ended. All requests have the
// same size.
func replayClosed(e *Engine, concurrency, prompt, output, n int) (records []served, gaps []float64) {
	before, after := e.Profile.Latency.BeforeScheduling/1000, e.Profile.Latency.AfterStep/1000
	e.Each = true
	type pending struct{ sent float64 }
	var due []pending // sorted by the field sent
	for range concurrency {
		due = append(due, pending{})
	}
	sent := map[*Request]float64{}
	seen := map[*Request]float64{}
	now := 0.0
	for len(records) < n {
		for len(due) > 0 && due[0].sent+before <= now {
			r := &Request{Prompt: prompt, Output: output, Salt: uint64(len(sent)) + 1}
			sent[r] = due[0].sent
			due = due[1:]
			e.Submit(r)
		}
		if e.Idle() {
			now = due[0].sent + before
			continue
		}
		now = e.Step(now)
		for _, r := range e.Emitted {
			if r.Chunks > 1 {
				gaps = append(gaps, 1000*(now-seen[r]))
			}
			seen[r] = now
			if r.Finished() {
				records = append(records, served{sent: sent[r], first: r.First + after, last: r.Last + after, output: r.Output})
				due = append(due, pending{now + after})
			}
		}
	}
	return records, gaps
}

// figures returns what vllm bench serve reports about a run: latencies in ms, tokens/s over the whole run, and the
// largest number of requests that were in flight in one second.
func figures(records []served, gaps []float64) map[string]float64 {
	var ttft, tpot, e2e []float64
	tokens, end := 0, 0.0
	flight := map[int]float64{}
	for _, r := range records {
		ttft, tpot, e2e = append(ttft, r.ttft()), append(tpot, r.tpot()), append(e2e, 1000*(r.last-r.sent))
		tokens += r.output
		end = max(end, r.last)
		for s := int(r.sent); s <= int(r.last); s++ {
			flight[s]++
		}
	}
	figures := map[string]float64{"output_tok_s": float64(tokens) / end, "req_s": float64(len(records)) / end}
	for _, n := range flight {
		figures["max_concurrent"] = max(figures["max_concurrent"], n)
	}
	for _, p := range []float64{50, 95, 99} {
		at := strconv.FormatFloat(p, 'f', -1, 64) + "_ms"
		figures["ttft_p"+at], figures["tpot_p"+at], figures["e2e_p"+at] = percentile(ttft, p), percentile(tpot, p), percentile(e2e, p)
		if len(gaps) > 0 {
			figures["itl_p"+at] = percentile(gaps, p)
		}
	}
	return figures
}

// percentile interpolates between two values, as numpy does by default.
func percentile(xs []float64, p float64) float64 {
	xs = slices.Sorted(slices.Values(xs))
	h := p / 100 * float64(len(xs)-1)
	i := int(h)
	if i+1 >= len(xs) {
		return xs[len(xs)-1]
	}
	return xs[i] + (h-float64(i))*(xs[i+1]-xs[i])
}

func mean(xs []float64) float64 {
	sum := 0.0
	for _, x := range xs {
		sum += x
	}
	return sum / math.Max(1, float64(len(xs)))
}
