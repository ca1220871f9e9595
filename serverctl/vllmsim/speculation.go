package vllmsim

import (
	"encoding/json"
	"fmt"
)

// Speculation holds the constants of speculative decoding: a drafter proposes k tokens a step for each sequence, and the
// model computes them all to see which it would have chosen itself.
type Speculation struct {
	DrafterGiB               float64   // GPU memory of the drafter and of its cache
	PerDraftToken            float64   // ms for each token of the proposal, whatever the batch
	PerDraftTokenAndSequence float64   // ms
	PerVerifiedToken         float64   // ms, on top of the token's compute
	Acceptance               []float64 // of the j-th token of a proposal, given that those before it were accepted; the last value holds for all later ones
}

// ngram is the method that looks proposals up in the prompt: it has no drafter.
const ngram = "ngram"

// setSpeculation reads --speculative-config. What is not simulated of it is not read.
func setSpeculation(o *Options, value any) error {
	var config struct {
		Method string `json:"method"`
		Tokens int    `json:"num_speculative_tokens"`
	}
	if err := json.Unmarshal(fmt.Append(nil, value), &config); err != nil {
		return err
	}
	o.SpeculativeMethod, o.SpeculativeTokens = config.Method, config.Tokens
	return nil
}

// drafts reports whether a drafter model stands beside the model.
func (o Options) drafts() bool { return o.SpeculativeTokens > 0 && o.SpeculativeMethod != ngram }

// accept draws how many tokens of a request's draft the model accepts. The draw belongs to the request and to its place in
// the answer, so that it does not depend on who else is in the batch.
func (e *Engine) accept(r *Request) int {
	if r.drafted == 0 {
		return 0
	}
	n := 0
	for !e.NoAcceptance && n < r.drafted && uniform(e.Seed, r.Salt, uint64(r.Tokens), uint64(n)) < e.acceptance(n) {
		e.Totals.AcceptedPerPos[n]++
		n++
	}
	e.Totals.Drafts++
	e.Totals.DraftTokens += r.drafted
	e.Totals.AcceptedTokens += n
	r.drafted = 0
	return n
}

// acceptance returns how likely the draft token at a 0-based place is accepted when those before it were.
func (e *Engine) acceptance(place int) float64 {
	chances := e.Profile.Speculation.Acceptance
	if len(chances) == 0 {
		return 0
	}
	return chances[min(place, len(chances)-1)]
}

// uniform returns a number from 0 to 1 that depends on the words alone.
func uniform(words ...uint64) float64 {
	h := uint64(0)
	for _, w := range words {
		h = mix(h, w)
	}
	return float64(h>>11) / (1 << 53)
}
