package vllm

import (
	"fmt"
	"math"
)

// samplingParams are fields of a request that do not change the simulated answer. The server checks them because vLLM
// refuses wrong values. So the simulator shows a client's mistake before a real server refuses the request.
type samplingParams struct {
	MinTokens         *float64 `json:"min_tokens"`
	Temperature       *float64 `json:"temperature"`
	TopP              *float64 `json:"top_p"`
	TopK              *float64 `json:"top_k"`
	MinP              *float64 `json:"min_p"`
	PresencePenalty   *float64 `json:"presence_penalty"`
	FrequencyPenalty  *float64 `json:"frequency_penalty"`
	RepetitionPenalty *float64 `json:"repetition_penalty"`
}

// check refuses the values that vLLM refuses (_verify_args in vllm/sampling_params.py). The parameter output is the
// number of tokens in the answer. Since 0.32.0 the temperature has an upper limit.
func (s samplingParams) check(r *release, output int) *apiError {
	const above0 = math.SmallestNonzeroFloat64
	inf := math.Inf(1)
	maxTemperature, temperatures := inf, "at least 0"
	if r.since032 {
		maxTemperature, temperatures = 2, "from 0 to 2"
	}
	for _, f := range []struct {
		name     string
		value    *float64
		min, max float64
		want     string
	}{
		{"min_tokens", s.MinTokens, 0, float64(output), fmt.Sprintf("from 0 to %d", output)},
		{"temperature", s.Temperature, 0, maxTemperature, temperatures},
		{"top_p", s.TopP, above0, 1, "above 0 and at most 1"},
		{"top_k", s.TopK, -1, inf, "at least -1"},
		{"min_p", s.MinP, 0, 1, "from 0 to 1"},
		{"presence_penalty", s.PresencePenalty, -2, 2, "from -2 to 2"},
		{"frequency_penalty", s.FrequencyPenalty, -2, 2, "from -2 to 2"},
		{"repetition_penalty", s.RepetitionPenalty, above0, inf, "above 0"},
	} {
		if f.value != nil && (*f.value < f.min || *f.value > f.max) {
			return badRequest(f.name, "%s must be %s, got %.15g.", f.name, f.want, *f.value)
		}
	}
	return nil
}
