package calibrate

import (
	"math"

	"vllmtuner/serverctl/sim"
)

// A constant is one number of a profile that can be fitted.
type constant struct {
	path   string
	anchor bool    // a fact about the device or the model, so its first value is trusted more
	low    float64 // smallest value; 0 means a thousandth of the first value
	high   float64 // largest value; 0 means a thousand times the first value
}

// memoryConstants are the constants of Profile.KVGiB, except the bytes per token. The bytes per token follow directly
// from a log that has the size of the KV cache in GiB and in tokens.
var memoryConstants = []constant{
	{path: "memory.gpu", anchor: true}, {path: "memory.fixed"}, {path: "memory.batch_per_token", anchor: true},
	{path: "memory.sampler_per_sequence", anchor: true}, {path: "memory.activation"},
	{path: "memory.activation_exponent", low: 0.1, high: 4}, {path: "speculation.drafter"},
}

// stepConstants are the constants of the engine's step time, the API server's latency and speculative decoding.
var stepConstants = []constant{
	{path: "step.fixed"}, {path: "step.weights"}, {path: "step.per_token"}, {path: "step.roofline_exponent", low: 1, high: 8},
	{path: "step.per_sequence"}, {path: "step.per_kv_token"}, {path: "step.per_attention_pair"}, {path: "step.prefill_extra"},
	{path: "step.eager_extra"}, {path: "latency.before_scheduling"}, {path: "latency.after_step"},
	{path: "speculation.per_draft_token"}, {path: "speculation.per_draft_token_and_sequence"}, {path: "speculation.per_verified_token"},
}

// fittable returns the constants that are above zero in a profile. The fit uses logarithms, and zero has none.
func fittable(p *sim.Profile, list []constant) (fit []constant) {
	for _, c := range list {
		if v := p.Value(c.path); v != nil && *v > 0 {
			fit = append(fit, c)
		}
	}
	return fit
}

// logs returns the logarithms of the constants in the list.
func logs(p *sim.Profile, list []constant) []float64 {
	values := make([]float64, len(list))
	for i, c := range list {
		values[i] = math.Log(*p.Value(c.path))
	}
	return values
}

// withLogs returns a copy of the profile with other values of the constants. The values are given as logarithms.
func withLogs(p *sim.Profile, list []constant, logs []float64) *sim.Profile {
	changed := *p
	for i, c := range list {
		*changed.Value(c.path) = math.Exp(logs[i])
	}
	return &changed
}

// bounds returns the smallest and largest allowed logarithm of each constant.
func bounds(first []float64, list []constant) (low, high []float64) {
	for i, c := range list {
		l, h := first[i]-math.Log(1000), first[i]+math.Log(1000)
		if c.low > 0 {
			l = math.Log(c.low)
		}
		if c.high > 0 {
			h = math.Log(c.high)
		}
		low, high = append(low, min(l, first[i])), append(high, max(h, first[i]))
	}
	return low, high
}

func anchors(list []constant) []bool {
	flags := make([]bool, len(list))
	for i, c := range list {
		flags[i] = c.anchor
	}
	return flags
}
