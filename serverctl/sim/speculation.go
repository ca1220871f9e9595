package sim

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Speculation holds the constants of speculative decoding. In each step a drafter proposes k tokens for each sequence.
// The model computes all of them, and accepts some.
type Speculation struct {
	DrafterGiB               float64   // GPU memory of the drafter and of its cache
	PerDraftToken            float64   // ms for each token of the draft, however many sequences there are
	PerDraftTokenAndSequence float64   // ms for each token of the draft and each sequence
	PerVerifiedToken         float64   // ms for each token that the model verifies, on top of its compute
	Acceptance               []float64 // chance that the j-th draft token is accepted after all earlier tokens of its draft; the last value holds for all later tokens
	LookupAcceptance         []float64 // the same chances for drafts that are looked up in the text so far (ngram, suffix)
}

// The methods ngram and suffix look drafts up in the text so far. They have no drafter.
const (
	ngram  = "ngram"
	suffix = "suffix"
)

// maxDraftTokens is more than any drafter proposes in one step.
const maxDraftTokens = 1000

// setSpeculation reads --speculative-config, and ignores keys that the simulation does not know. Its error is a
// *ConfigError with the text of vLLM's SpeculativeConfig (vllm/config/speculative.py).
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

// speculativeMethods are vLLM's methods to propose tokens (SpeculativeMethod in vllm/config/speculative.py, 0.14.1).
var speculativeMethods = []string{ngram, "medusa", "mlp_speculator", "draft_model", suffix, "eagle", "eagle3", "deepseek_mtp",
	"mimo_mtp", "glm4_moe_mtp", "ernie_mtp", "exaone_moe_mtp", "qwen3_next_mtp", "longcat_flash_mtp", "mtp", "pangu_ultra_moe_mtp"}

// hasDrafter reports whether a drafter, which is a second model, runs beside the model.
func (o Options) hasDrafter() bool { return o.SpeculativeTokens > 0 && !o.usesPromptLookup() }

func (o Options) usesPromptLookup() bool {
	return o.SpeculativeMethod == ngram || o.SpeculativeMethod == suffix
}

// accept decides at random how many tokens of a request's draft the model accepts. The random numbers depend only on
// the request and on the position in its answer, not on the rest of the batch.
func (e *Engine) accept(r *Request) int {
	if r.drafted == 0 {
		return 0
	}
	n := 0
	for !e.NoAcceptance && n < r.drafted && uniform(e.Seed, r.Salt, uint64(r.Tokens), uint64(n)) < e.Profile.acceptance(e.Options, n) {
		e.Totals.AcceptedPerPos[n]++
		n++
	}
	e.Totals.Drafts++
	e.Totals.DraftTokens += r.drafted
	e.Totals.AcceptedTokens += n
	r.drafted = 0
	return n
}

// acceptance returns the chance that the model accepts a draft token after it has accepted all earlier tokens of the
// draft. The parameter position is the number of the token in its draft, from 0. The chance is 0 if the profile has no
// constants for the method.
func (p *Profile) acceptance(o Options, position int) float64 {
	chances := p.Speculation.Acceptance
	if o.usesPromptLookup() {
		chances = p.Speculation.LookupAcceptance
	}
	if len(chances) == 0 {
		return 0
	}
	return chances[min(position, len(chances)-1)]
}

// uniform returns a pseudo-random number from 0 to 1 that depends only on the given words.
func uniform(words ...uint64) float64 {
	h := uint64(0)
	for _, w := range words {
		h = mix(h, w)
	}
	return float64(h>>11) / (1 << 53)
}
