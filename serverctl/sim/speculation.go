package sim

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Speculation holds the constants of speculative decoding: a drafter proposes k tokens a step for each sequence, and the
// model computes them all to see which it would have chosen itself.
type Speculation struct {
	DrafterGiB               float64   // GPU memory of the drafter and of its cache
	PerDraftToken            float64   // ms for each token of the proposal, whatever the batch
	PerDraftTokenAndSequence float64   // ms
	PerVerifiedToken         float64   // ms, on top of the token's compute
	Acceptance               []float64 // of the j-th token of a proposal, given that those before it were accepted; the last value holds for all later ones
	LookupAcceptance         []float64 // the same of tokens that are looked up in the prompt (ngram, suffix)
}

// The methods that look proposals up in what was said before: they have no drafter.
const (
	ngram  = "ngram"
	suffix = "suffix"
)

// maxDraftTokens is more than any drafter proposes in one step.
const maxDraftTokens = 1000

// setSpeculation reads --speculative-config, as far as the simulation knows its keys. Its error is a *ConfigError with the words
// of vLLM's SpeculativeConfig (vllm/config/speculative.py).
func (o *Options) setSpeculation(value any) error {
	text, _ := value.(json.RawMessage)
	var config map[string]any
	if err := json.Unmarshal(text, &config); err != nil {
		return &ConfigError{Text: "Input should be a valid dictionary"}
	}
	tokens, given := config["num_speculative_tokens"]
	n, isNumber := tokens.(float64)
	method, _ := config["method"].(string)
	switch {
	case !given:
		return &ConfigError{Text: "num_speculative_tokens must be provided with speculative model unless the draft model config contains an n_predict parameter."}
	case !isNumber || n != math.Trunc(n):
		return &ConfigError{Text: "Input should be a valid integer"}
	case n < 1:
		return &ConfigError{Text: "Input should be greater than 0"}
	case n > maxDraftTokens:
		return &ConfigError{Text: fmt.Sprintf("the simulated server proposes at most %d tokens a step", maxDraftTokens)}
	case method == "" && config["model"] == ngram || method == "[ngram]":
		method = ngram
	case method != "" && !slices.Contains(speculativeMethods, method):
		return &ConfigError{Text: "Input should be '" + strings.Join(speculativeMethods, "', '") + "'"}
	}
	o.SpeculativeMethod, o.SpeculativeTokens = method, int(n)
	return nil
}

// speculativeMethods are the ways to propose tokens that vLLM has (SpeculativeMethod in vllm/config/speculative.py, 0.14.1).
var speculativeMethods = []string{ngram, "medusa", "mlp_speculator", "draft_model", suffix, "eagle", "eagle3", "deepseek_mtp",
	"mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "exaone_moe_mtp", "qwen3_next_mtp", "longcat_flash_mtp", "mtp", "pangu_ultra_moe_mtp"}

// drafts reports whether a drafter model stands beside the model.
func (o Options) drafts() bool { return o.SpeculativeTokens > 0 && !o.looksUp() }

func (o Options) looksUp() bool { return o.SpeculativeMethod == ngram || o.SpeculativeMethod == suffix }

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

// acceptance returns how likely the draft token at a 0-based place is accepted when those before it were: never, where the
// profile says nothing of the method.
func (e *Engine) acceptance(place int) float64 {
	chances := e.Profile.Speculation.Acceptance
	if e.Options.looksUp() {
		chances = e.Profile.Speculation.LookupAcceptance
	}
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
