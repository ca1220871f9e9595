package sim

import (
	"errors"
	"math"
	"strings"
	"testing"

	"vllmtuner/realtime"
)

// speculated has median TPOTs in ms. Each row has a number of draft tokens (k), and a chance that the model accepts a
// draft token. The load is 1 request/s, after ten warm-up requests. Only the row with k = 3 and acceptance 0 was
// measured. The other rows come from the program in which the profile was fitted.
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
	compareSpeculation(t, 3, 9)
}

func TestSpeculationWithDraftsOfAnyLength(t *testing.T) {
	realtime.Only(t, "replays the trace for 13 combinations")
	compareSpeculation(t, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)
}

// compareSpeculation replays the trace for some rows of speculated.
func compareSpeculation(t *testing.T, rows ...int) {
	t.Helper()
	trace := readTrace(t)
	for _, i := range rows {
		row := speculated[i]
		p := profile(t, "h200-llama70b-fp8").quiet()
		p.Speculation.Acceptance = []float64{row.acceptance}
		o := p.Defaults
		o.GPUMemoryUtilization, o.MaxNumBatchedTokens, o.MaxNumSeqs, o.MaxModelLen = 0.95, 16384, 128, 16384
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

// The counters of drafts add up, and an answer has exactly the wanted length.
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
	for position, want := range []float64{0.8, 0.8 * 0.5, 0.8 * 0.5 * 0.5} {
		sum += c.AcceptedPerPos[position]
		if got := float64(c.AcceptedPerPos[position]) / float64(c.Drafts); math.Abs(got-want) > 0.04 {
			t.Errorf("the draft token at position %d is accepted in %.3f of the drafts, want %.3f", position, got, want)
		}
	}
	if sum != c.AcceptedTokens {
		t.Errorf("%d accepted tokens, %d by position", c.AcceptedTokens, sum)
	}
}

// The method ngram needs no memory for a drafter.
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
		t.Error("a broken --speculative-config is accepted")
	}
}

func TestAWrongSpeculationIsRefused(t *testing.T) {
	p := profile(t, "small-fast")
	for config, want := range map[string]string{
		`{"method":"eagle3"}`:                               "num_speculative_tokens must be provided",
		`{"method":"eagle3","num_speculative_tokens":-1}`:   "greater than 0",
		`{"method":"eagle3","num_speculative_tokens":2.5}`:  "valid integer",
		`{"method":"eagle3","num_speculative_tokens":1e12}`: "at most 1000",
		`{"method":"foo","num_speculative_tokens":3}`:       "Input should be 'ngram', 'medusa'",
		`3`: "valid dictionary",
	} {
		_, err := p.ParseArgs([]string{"--speculative-config", config})
		if refusal, ok := errors.AsType[*ConfigError](err); !ok || !strings.Contains(refusal.Text, want) {
			t.Errorf("%s: %v, want a refusal that says %q", config, err, want)
		}
	}
	l4 := profile(t, "l4-qwen0.5b") // this server was never measured with speculation
	o := l4.Defaults
	o.SpeculativeTokens, o.SpeculativeMethod = 3, "eagle3"
	if _, err := NewEngine(l4, o); err == nil || !strings.Contains(err.Error(), "no constants for speculative decoding") {
		t.Errorf("NewEngine = %v for a profile without constants for speculation", err)
	}
}

// A profile has one acceptance for drafters, and another for drafts that are looked up in the text so far.
func TestAMethodHasItsOwnAcceptance(t *testing.T) {
	p := profile(t, "small-fast")
	share := func(method string) float64 {
		o := p.Defaults
		o.SpeculativeTokens, o.SpeculativeMethod = 1, method
		e, err := NewEngine(p, o)
		if err != nil {
			t.Fatal(err)
		}
		drive(t, e, []*Request{{Prompt: 100, Output: 5000, Salt: 1}}, []float64{0}, func(float64, float64) {})
		return float64(e.Totals.AcceptedTokens) / float64(e.Totals.DraftTokens)
	}
	if eagle, ngram := share("eagle3"), share("ngram"); math.Abs(eagle-0.7) > 0.04 || math.Abs(ngram-0.2) > 0.04 {
		t.Errorf("the acceptance is %.2f with eagle3 and %.2f with ngram, want 0.7 and 0.2", eagle, ngram)
	}
}
