package vllmsim

import (
	"math"
	"testing"
)

// The calibrated model's median TPOT at 1 request/s after ten requests of warm-up, in ms, by tokens of a draft and by the chance
// that one is accepted. Only
// k = 3 with nothing accepted was measured; the other rows hold the engine against the program in which it was fitted.
var speculated = []struct {
	k          int
	acceptance float64
	tpot       float64
}{
	{0, 0, 30.8}, {1, 0, 32.8}, {2, 0, 35.4}, {3, 0, 38.6}, {5, 0, 49.4}, {7, 0, 74.0},
	{1, 0.7, 17.1}, {2, 0.7, 13.4}, {3, 0.7, 11.7}, {5, 0.7, 10.6}, {7, 0.7, 10.5}, {3, 0.9, 8.4}, {7, 0.9, 5.3},
}

func TestSpeculationCostsAndGainsAsCalibrated(t *testing.T) {
	t.Parallel()
	trace := readTrace(t)
	for _, row := range speculated {
		p := ofTheLandscape(t)
		p.Speculation.Acceptance = []float64{row.acceptance}
		o := p.Defaults
		o.GPUMemoryUtilization, o.MaxNumBatchedTokens, o.MaxNumSeqs, o.MaxModelLen, o.EnforceEager = 0.95, 16384, 128, 16384, true
		o.SpeculativeTokens, o.SpeculativeMethod = row.k, "eagle3"
		e, err := NewEngine(p, o)
		if err != nil {
			t.Fatal(err)
		}
		want := 57.07
		if row.k == 0 {
			want = 61.78
		}
		if kv := p.KVGiB(o); math.Abs(kv-want) > 0.01 {
			t.Errorf("k = %d: KV cache of %.2f GiB, want %.2f", row.k, kv, want)
		}
		replay(e, trace[:10], 0.5)
		f := figures(replay(e, trace, 1))
		t.Logf("k = %d, acceptance %.1f: TPOT p50 %.1f ms, calibrated %.1f", row.k, row.acceptance, f["tpot_p50_ms"], row.tpot)
		if math.Abs(f["tpot_p50_ms"]/row.tpot-1) > 0.02 {
			t.Errorf("k = %d, acceptance %.1f: TPOT p50 %.1f ms, the calibrated model has %.1f", row.k, row.acceptance, f["tpot_p50_ms"], row.tpot)
		}
	}
}

// What is counted of drafts adds up, and an answer is exactly as long as it was to be.
func TestDraftsAreCounted(t *testing.T) {
	p := *profile(t, "small-fast")
	p.Speculation.Acceptance = []float64{0.8, 0.5}
	o := p.Defaults
	o.SpeculativeTokens, o.SpeculativeMethod = 3, "eagle3"
	e, err := NewEngine(&p, o)
	if err != nil {
		t.Fatal(err)
	}
	r := &Request{Prompt: 100, Output: 6000, Salt: 1}
	drive(t, e, []*Request{r}, []float64{0}, func(float64, float64) {})
	c := e.Totals
	if r.Tokens != 6000 || c.GenerationTokens != 6000 || c.Drafts != r.Chunks-1 || c.DraftTokens < 3*(c.Drafts-1) {
		t.Errorf("%d tokens in %d steps, %+v", r.Tokens, r.Chunks, c)
	}
	sum := 0
	for place, want := range []float64{0.8, 0.8 * 0.5, 0.8 * 0.5 * 0.5} {
		sum += c.AcceptedPerPos[place]
		if got := float64(c.AcceptedPerPos[place]) / float64(c.Drafts); math.Abs(got-want) > 0.04 {
			t.Errorf("the draft token at place %d is accepted in %.3f of the drafts, want %.3f", place, got, want)
		}
	}
	if sum != c.AcceptedTokens {
		t.Errorf("%d accepted tokens, %d by place", c.AcceptedTokens, sum)
	}
}

// A proposal that is looked up in the prompt needs no drafter in memory.
func TestNgramNeedsNoDrafter(t *testing.T) {
	p := profile(t, "h200-llama70b-fp8")
	none, err := p.ParseArgs(nil)
	if err != nil {
		t.Fatal(err)
	}
	for config, want := range map[string]float64{
		`{"method":"ngram","num_speculative_tokens":4}`:  p.KVGiB(none),
		`{"method":"eagle3","num_speculative_tokens":4}`: p.KVGiB(none) - p.Speculation.DrafterGiB,
	} {
		o, err := p.ParseArgs([]string{"--speculative-config", config})
		if err != nil {
			t.Fatal(err)
		}
		if got := p.KVGiB(o); got != want || o.SpeculativeTokens != 4 {
			t.Errorf("%s: KV cache of %.2f GiB with %d tokens, want %.2f", config, got, o.SpeculativeTokens, want)
		}
	}
	if _, err := p.ParseArgs([]string{"--speculative-config", "{"}); err == nil {
		t.Error("a broken --speculative-config is taken")
	}
}
