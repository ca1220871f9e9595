package sim

import (
	"fmt"
	"math"
)

const gib = 1 << 30

// BlockSize is the number of tokens in a block of the KV cache. It is vLLM's default on CUDA.
const BlockSize = 16

// A StartError is a failed start, with the text that vLLM logs for it.
type StartError struct {
	Text    string
	Summary string   // short form of Text, without its figures; only KVTokens sets it
	OOM     bool     // true if the GPU is out of memory; if KVTokens leaves it false, the KV cache is too small
	KVGiB   *float64 // size of the KV cache that is too small, in GiB; nil if Text does not tell it
}

// Error returns vLLM's text.
func (e *StartError) Error() string { return e.Text }

// KVGiB returns the size of the KV cache in GiB. The size may be negative:
//
//	KV = util·G − F − b·mnbt − max(A·(mnbt/8192)^x, s·mns)  [− the drafter's memory]
//
// mnbt is max-num-batched-tokens and mns is max-num-seqs. The other letters are the constants of Memory. The prefill
// and the sampler's dummy run come one after the other, so the equation has the larger of their two memory peaks. It
// gives the seven KV sizes in the start-up logs of the H200 to within 0.01 GiB.
func (p *Profile) KVGiB(o Options) float64 {
	m := p.Memory
	batched, seqs := float64(o.MaxNumBatchedTokens), float64(o.MaxNumSeqs)
	activation := m.ActivationGiB * math.Pow(batched/8192, m.ActivationExponent)
	sampler := m.SamplerBytesPerSeq * seqs / gib
	kv := o.GPUMemoryUtilization*m.GPUGiB - m.FixedGiB - m.BatchBytesPerToken*batched/gib - max(activation, sampler)
	if o.hasDrafter() {
		kv -= p.Speculation.DrafterGiB
	}
	return kv
}

// KVTokens returns how many tokens the KV cache holds, in whole blocks. Its error is a *StartError if the server would
// not start.
func (p *Profile) KVTokens(o Options) (int, error) {
	kv := p.KVGiB(o)
	if kv <= 0 {
		const summary = "ValueError: No available memory for the cache blocks"
		return 0, &StartError{Summary: summary, Text: summary + ". Try increasing `gpu_memory_utilization` when initializing the engine."}
	}
	tokens := int(kv*gib/p.Memory.KVBytesPerToken) / BlockSize * BlockSize
	if tokens < o.MaxModelLen {
		need := float64(o.MaxModelLen) * p.Memory.KVBytesPerToken / gib
		return 0, &StartError{KVGiB: &kv, Summary: "ValueError: the KV cache is too small for one request of max_model_len tokens", Text: fmt.Sprintf("ValueError: To serve at least one request with the models's max seq len (%d), "+
			"(%.2f GiB KV cache is needed, which is larger than the available KV cache memory (%.2f GiB). "+
			"Based on the available memory, the estimated maximum model length is %d. "+
			"Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.",
			o.MaxModelLen, need, kv, tokens)}
	}
	if (1-o.GPUMemoryUtilization)*p.Memory.GPUGiB < p.Memory.GraphReserveGiB {
		const summary = "torch.OutOfMemoryError: CUDA out of memory"
		return 0, &StartError{OOM: true, Summary: summary, Text: summary + ". Tried to allocate 512.00 MiB. " +
			"GPU 0 has a total capacity of " + fmt.Sprintf("%.2f GiB", p.Memory.GPUGiB) + " of which 300.00 MiB is free."}
	}
	return tokens, nil
}

// maxKVTokens limits the size of the KV cache, because the simulator keeps an entry for each block of the cache.
const maxKVTokens = 200_000_000

// checkSimulated returns a *ConfigError if the options cannot be simulated. The profile may have no constants for them, or
// the KV cache may be too large.
func (p *Profile) checkSimulated(o Options) error {
	if o.SpeculativeTokens > 0 && len(p.Speculation.Acceptance)+len(p.Speculation.LookupAcceptance) == 0 {
		return &ConfigError{Text: fmt.Sprintf("the simulator profile %s has no constants for speculative decoding", p.Name)}
	}
	if tokens := p.KVGiB(o) * gib / p.Memory.KVBytesPerToken; tokens > maxKVTokens {
		return &ConfigError{Text: fmt.Sprintf("the KV cache would hold %.3g tokens; the simulator can hold at most %d", tokens, maxKVTokens)}
	}
	return nil
}
