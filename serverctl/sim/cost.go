package sim

import "math"

// A batch is the work of one engine step.
type batch struct {
	decodes        int     // sequences that decode
	draftTokens    int     // draft tokens of the decoding sequences, which the model must verify
	kvTokens       int     // context tokens that the decoding sequences read
	prefillTokens  int     // prompt tokens to compute
	attentionPairs float64 // the sum of chunk · (context + chunk/2) over all prefill chunks
}

func (b batch) tokens() int { return b.decodes + b.draftTokens + b.prefillTokens }

// A stepTimer computes how long the steps of one server take.
type stepTimer struct {
	step    StepCost
	draft   Speculation
	k       int       // number of tokens in a draft; 0 means no drafter
	graphs  []int     // graphs[n] is the size of the CUDA graph that runs n tokens
	compute []float64 // compute[n] is the time in ms to read the weights and to compute n tokens; 0 means not computed yet
}

// maxMemoized is the largest number of tokens whose compute time is remembered.
const maxMemoized = 1 << 16

func newStepTimer(p *Profile, o Options) *stepTimer {
	t := &stepTimer{step: p.Step, draft: p.Speculation}
	if o.hasDrafter() {
		t.k = o.SpeculativeTokens
	}
	if !o.EnforceEager {
		t.graphs = padding(captureSizes(o))
	}
	t.compute = make([]float64, min(o.MaxNumBatchedTokens, maxMemoized)+1)
	return t
}

// milliseconds returns how long the engine takes for a step:
//
//	S0 + (W^p + (B·T)^p)^(1/p) + C·n + D·(KV tokens read) + E·Σ chunk·(context + chunk/2)  [+ extra with prefill]
//	[+ k·(Dr0 + Dr1·n) + V·k·n with speculation]  [+ extra without a CUDA graph]
//
// T is the number of decoded, drafted and prefilled tokens, and n the number of decoding sequences. If the profile
// gives padding a cost, the sum also has a fraction of the time for the empty places in the CUDA graph. The constants
// come from the profile.
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

// roofline combines the time to read the weights with the time to compute the tokens.
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

// norm returns (a^p + b^p)^(1/p) for a and b of at least 0. No intermediate value overflows.
func norm(a, b, p float64) float64 {
	larger := max(a, b)
	if larger == 0 {
		return 0
	}
	return larger * math.Pow(1+math.Pow(min(a, b)/larger, p), 1/p)
}

// captureSizes returns the batch sizes, in tokens, for which the server captures CUDA graphs: 1, 2, 4, then every 8 up
// to 256 and every 16 beyond. The largest size is twice the tokens that max-num-seqs sequences decode in a step. It is
// at most 512, and at most max-num-batched-tokens (_set_cudagraph_sizes in vllm/config/vllm.py, 0.14.1).
func captureSizes(o Options) []int {
	largest := min(2*o.MaxNumSeqs*(1+o.SpeculativeTokens), 512, o.MaxNumBatchedTokens)
	var sizes []int
	for _, n := range []int{1, 2, 4} {
		if n <= largest {
			sizes = append(sizes, n)
		}
	}
	for n := 8; n <= largest && n < 256; n += 8 {
		sizes = append(sizes, n)
	}
	for n := 256; n <= largest; n += 16 {
		sizes = append(sizes, n)
	}
	return sizes
}

// padding returns a slice whose entry n is the smallest of the sizes that holds n tokens. The slice has an entry for
// each n up to the largest size.
func padding(sizes []int) []int {
	var padded []int
	for _, size := range sizes {
		for len(padded) <= size {
			padded = append(padded, size)
		}
	}
	return padded
}
