package tuner

import (
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// presets are points that do well on many servers. The search begins with them, and measures them like any other point.
// 128 sequences keep the time per token of a 70B model on one GPU within usual limits. 8,192 tokens prefill a long
// prompt in one step (vLLM's docs/configuration/optimization.md). 0.95 leaves as little memory unused as most GPUs
// allow.
var presets = []map[string]string{
	{"gpu-memory-utilization": "0.95", "max-num-seqs": "128", "max-num-batched-tokens": "8192", space.SpeculativeTokens: "0"},
	{"gpu-memory-utilization": "0.95", "max-num-seqs": "128", "max-num-batched-tokens": "8192", space.SpeculativeTokens: "3"},
}

// untriedPreset returns a preset that was not measured yet, or nil.
func (s *Study) untriedPreset(study studies.Study) space.Point {
	if !s.Presets {
		return nil
	}
	for _, p := range presetPoints(s.Space) {
		if !isMeasured(study, p) {
			return p
		}
	}
	return nil
}

// presetPoints returns the presets as points of a space. A point has those flags of its preset that are searched, each
// with the nearest legal value. A preset is left out if none of its flags is searched, or if its point breaks a
// constraint.
func presetPoints(s *space.Space) (points []space.Point) {
	for _, preset := range presets {
		p := space.Point{}
		for name, value := range preset {
			if parameter := s.Parameter(name); parameter != nil {
				p[name] = value
			}
		}
		nearest := s.Nearest(p)
		if len(nearest) > 0 && s.Check(nearest) == nil {
			points = append(points, nearest)
		}
	}
	return points
}
