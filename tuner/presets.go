package tuner

import (
	"slices"

	"github.com/samber/lo"

	"vllmtuner/studies"
	"vllmtuner/trial"
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

// smallPreset follows if a preset ran out of memory, and no preset ran. On a small GPU, many of the first servers may
// fail. Without a good point that runs, the search then stays at low utilizations, where the KV cache is small.
var smallPreset = map[string]string{
	"gpu-memory-utilization": "0.92", "max-num-seqs": "64", "max-num-batched-tokens": "2048", space.SpeculativeTokens: "0",
}

// shortDrafts follows if the preset with three draft tokens carried less than the preset with none. If few draft tokens are
// accepted, a single one may still pay.
var shortDrafts = map[string]string{
	"gpu-memory-utilization": "0.95", "max-num-seqs": "128", "max-num-batched-tokens": "8192", space.SpeculativeTokens: "1",
}

// untriedPreset returns a preset that was not measured yet, or nil.
func (s *Study) untriedPreset(study studies.Study) space.Point {
	if !s.Presets {
		return nil
	}
	points := presetPoints(s.Space, presets)
	ranOut := func(t studies.Trial) bool {
		return t.Result.Outcome == trial.Infeasible && t.Result.Class.OutOfMemory()
	}
	tried := lo.Filter(study.Trials, func(t studies.Trial, _ int) bool { return t.Origin == studies.Preset && t.State == studies.Done })
	ran := func(t studies.Trial) bool {
		return t.Result.Outcome == trial.Measured || t.Result.Outcome == trial.Dropped
	}
	if slices.ContainsFunc(tried, ranOut) && !slices.ContainsFunc(tried, ran) {
		points = append(points, presetPoints(s.Space, []map[string]string{smallPreset})...)
	}
	if draftsLost(tried) {
		points = append(points, presetPoints(s.Space, []map[string]string{shortDrafts})...)
	}
	for _, p := range points {
		if !isMeasured(study, p) {
			return p
		}
	}
	return nil
}

// draftsLost reports whether a preset with draft tokens ran, and carried less than a preset without them.
func draftsLost(tried []studies.Trial) bool {
	without, found := lo.Find(tried, func(t studies.Trial) bool { return t.Point[space.SpeculativeTokens] == "0" })
	return found && slices.ContainsFunc(tried, func(t studies.Trial) bool {
		drafts := t.Point[space.SpeculativeTokens]
		return drafts != "" && drafts != "0" && t.Result.Outcome != trial.Infeasible && t.Result.Capacity.Rate < without.Result.Capacity.Rate
	})
}

// presetPoints returns presets as points of a space. A point has those flags of its preset that are searched, each with
// the nearest legal value. A preset is left out if none of its flags is searched, or if its point breaks a constraint.
func presetPoints(s *space.Space, presets []map[string]string) (points []space.Point) {
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
