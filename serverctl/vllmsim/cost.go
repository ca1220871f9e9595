package vllmsim

import "math"

// A batch is the work of one engine step.
type batch struct {
	decodes        int     // sequences that decode one token
	kvTokens       int     // context tokens that those read
	prefillTokens  int     // prompt tokens computed
	attentionPairs float64 // sum over prefill chunks of chunk · (context + chunk/2)
}

// Milliseconds returns how long the engine takes for a step:
//
//	S0 + (W^p + (B·T)^p)^(1/p) + C·n + D·(KV tokens read) + E·Σ chunk·(context + chunk/2)  [+ extra with prefill]
//
// where T counts decoded and prefilled tokens and n the decoding sequences. Calibrated as the profiles say.
func (c *StepCost) Milliseconds(b batch) float64 {
	compute := c.PerToken * float64(b.decodes+b.prefillTokens)
	ms := c.Fixed + math.Pow(math.Pow(c.Weights, c.RooflineExponent)+math.Pow(compute, c.RooflineExponent), 1/c.RooflineExponent) +
		c.PerSequence*float64(b.decodes) + c.PerKVToken*float64(b.kvTokens)
	if b.prefillTokens > 0 {
		ms += c.PrefillExtra + c.PerAttentionPair*b.attentionPairs
	}
	return ms
}
