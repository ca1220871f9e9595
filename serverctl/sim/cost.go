package sim

import "math"

// A batch is the work of one engine step.
type batch struct {
	decodes        int     // sequences that decode
	draftTokens    int     // of their drafts, to be verified
	kvTokens       int     // context tokens that those read
	prefillTokens  int     // prompt tokens computed
	attentionPairs float64 // sum over prefill chunks of chunk · (context + chunk/2)
}

func (b batch) tokens() int { return b.decodes + b.draftTokens + b.prefillTokens }

// A stepTimer knows how long the steps of one server take.
type stepTimer struct {
	step    StepCost
	draft   Speculation
	k       int       // tokens of a draft; 0 without a drafter
	graphs  []int     // by number of tokens: how many the CUDA graph computes that is run for them
	compute []float64 // milliseconds of weights and compute by number of tokens; 0 is not known yet
}

// mostKnown is up to how many tokens the compute time of a batch is kept.
const mostKnown = 1 << 16

func newStepTimer(p *Profile, o Options) *stepTimer {
	t := &stepTimer{step: p.Step, draft: p.Speculation}
	if o.drafts() {
		t.k = o.SpeculativeTokens
	}
	if !o.EnforceEager {
		t.graphs = padding(captureSizes(o))
	}
	t.compute = make([]float64, min(o.MaxNumBatchedTokens, mostKnown)+1)
	return t
}

// milliseconds returns how long the engine takes for a step:
//
//	S0 + (W^p + (B·T)^p)^(1/p) + C·n + D·(KV tokens read) + E·Σ chunk·(context + chunk/2)  [+ extra with prefill]
//	[+ k·(Dr0 + Dr1·n) + V·k·n with speculation]  [+ extra without a CUDA graph]
//
// where T counts the decoded, drafted and prefilled tokens, filled up to the size of a CUDA graph as far as the profile says
// that this costs time, and n the decoding sequences. Calibrated as the profiles say.
func (t *stepTimer) milliseconds(b batch) float64 {
	c := &t.step
	tokens := b.tokens()
	captured := tokens < len(t.graphs)
	compute := t.roofline(tokens)
	if captured && c.GraphPadding > 0 {
		compute += c.GraphPadding * (t.roofline(t.graphs[tokens]) - compute)
	}
	ms := c.Fixed + compute + c.PerSequence*float64(b.decodes) + c.PerKVToken*float64(b.kvTokens)
	if b.prefillTokens > 0 {
		ms += c.PrefillExtra + c.PerAttentionPair*b.attentionPairs
	}
	if !captured && b.prefillTokens == 0 {
		ms += c.EagerExtra
	}
	if b.draftTokens > 0 {
		drafts := float64(b.draftTokens)
		ms += t.draft.PerVerifiedToken * drafts
		if t.k > 0 {
			ms += t.draft.PerDraftToken*float64(t.k) + t.draft.PerDraftTokenAndSequence*drafts
		}
	}
	return ms
}

// roofline joins the time to read the weights and the time to compute so many tokens.
func (t *stepTimer) roofline(tokens int) float64 {
	if tokens < len(t.compute) && t.compute[tokens] > 0 {
		return t.compute[tokens]
	}
	c := &t.step
	ms := norm(c.Weights, c.PerToken*float64(tokens), c.RooflineExponent)
	if tokens < len(t.compute) {
		t.compute[tokens] = ms
	}
	return ms
}

// norm is (a^p + b^p)^(1/p) for a and b of at least 0, without an overflow on the way.
func norm(a, b, p float64) float64 {
	most := max(a, b)
	if most == 0 {
		return 0
	}
	return most * math.Pow(1+math.Pow(min(a, b)/most, p), 1/p)
}

// captureSizes returns the batch sizes, in tokens, for which the server captures CUDA graphs: 1, 2, 4, then every 8 up to 256
// and every 16 beyond, up to twice the sequences and to 512 (vllm/config/vllm.py, _set_cudagraph_sizes, 0.14.1).
func captureSizes(o Options) []int {
	const largest = 512
	most := min(2*o.MaxNumSeqs*(1+o.SpeculativeTokens), largest, o.MaxNumBatchedTokens)
	var sizes []int
	for _, n := range []int{1, 2, 4} {
		if n <= most {
			sizes = append(sizes, n)
		}
	}
	for n := 8; n <= most && n < 256; n += 8 {
		sizes = append(sizes, n)
	}
	for n := 256; n <= most; n += 16 {
		sizes = append(sizes, n)
	}
	return sizes
}

// padding returns for each number of tokens up to the largest size the size that holds them.
func padding(sizes []int) []int {
	var padded []int
	for _, size := range sizes {
		for len(padded) <= size {
			padded = append(padded, size)
		}
	}
	return padded
}
