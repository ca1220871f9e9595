package calibrate

import (
	"context"
	"fmt"
	"math"
	"slices"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/serverctl/sim"
)

const (
	gib = 1 << 30
	// kvError is the standard deviation of a logged KV size in GiB. It follows from the two decimals that logs show.
	kvError = 0.005
	// halfBlock is the mean error of a logged size in tokens: the size is rounded down to whole blocks of 16.
	halfBlock = 8
)

// A kvSize is the size of the KV cache in the log of one start.
type kvSize struct {
	options sim.Options
	gib     float64
	refused bool // the start was refused because of this size
}

// kvSizes returns the sizes of the KV cache from the logs of all trials, including refused starts. Each size has the
// options of its trial.
func (c *calibration) kvSizes(p *sim.Profile) (sizes []kvSize) {
	for _, t := range c.Study.Trials {
		options, err := optionsOf(p, t)
		if err != nil {
			continue // the method choose reports this error
		}
		facts := t.Result.Facts
		refused := t.Result.KVGiB
		if refused == nil { // a study of an older tuner has the size only in the evidence
			refused = serverctl.AvailableKVGiB(t.Result.Evidence)
		}
		switch {
		case facts.KVCacheGiB > 0:
			sizes = append(sizes, kvSize{options, facts.KVCacheGiB, false})
		case facts.KVCacheTokens > 0:
			sizes = append(sizes, kvSize{options, float64(facts.KVCacheTokens) * p.Memory.KVBytesPerToken / gib, false})
		case t.Result.Class == serverctl.KVTooSmall && refused != nil:
			sizes = append(sizes, kvSize{options, *refused, true})
		}
	}
	return sizes
}

// bytesPerToken returns the bytes of KV cache per token. It is the median of the n starts whose log has the size in GiB
// and in tokens.
func (c *calibration) bytesPerToken() (bytes float64, n int) {
	var all []float64
	for _, t := range c.Study.Trials {
		if f := t.Result.Facts; f.KVCacheGiB > 0 && f.KVCacheTokens > 0 {
			all = append(all, f.KVCacheGiB*gib/(float64(f.KVCacheTokens)+halfBlock))
		}
	}
	if len(all) == 0 {
		return 0, 0
	}
	return median(all), len(all)
}

// solveMemory fits the constants that determine the size of the KV cache.
func (c *calibration) solveMemory(ctx context.Context, p *sim.Profile) error {
	if bytes, n := c.bytesPerToken(); n > 0 {
		c.set(p, "memory.kv_per_token", bytes, "solved", "from the KV sizes in GiB and in tokens of %s", render.Count(n, "start"))
	}
	sizes := c.kvSizes(p)
	c.result.Memory.N = len(sizes)
	for _, s := range sizes {
		if s.refused {
			c.result.Memory.Refused++
		}
	}
	if len(sizes) == 0 {
		c.note("no start logged the size of its KV cache: the memory constants keep the values of %s", c.From.Name)
		return nil
	}
	list := fittable(p, memoryConstants)
	f, err := fitMemory(ctx, p, list, sizes)
	if err != nil {
		return err
	}
	c.result.Memory.Before = rootMeanSquare(p, sizes)
	c.record(p, f, "solved", fmt.Sprintf("solved from the KV sizes of %s", render.Count(len(sizes), "start")), "these starts")
	c.result.Memory.After = rootMeanSquare(p, sizes)
	return nil
}

// fitMemory fits from several starting points and returns the best fit. The activations and the sampler have a memory
// peak each, and only the larger peak has an effect. If a fit begins with a peak that is too small, it never fits that
// peak.
func fitMemory(ctx context.Context, p *sim.Profile, list []constant, sizes []kvSize) (best *fit, err error) {
	first := logs(p, list)
	low, high := bounds(first, list)
	problem := problem{low: low, high: high, step: 1e-4, residuals: func(_ context.Context, logs []float64) ([]float64, error) {
		return kvResiduals(withLogs(p, list, logs), sizes), nil
	}}
	for _, activation := range []float64{1, 0.2, 5} {
		for _, sampler := range []float64{1, 0.2, 5} {
			f := newFit(list, first)
			for k, c := range list {
				switch c.path {
				case "memory.activation":
					f.logs[k] += math.Log(activation)
				case "memory.sampler_per_sequence":
					f.logs[k] += math.Log(sampler)
				}
			}
			if err := f.fitAll(ctx, problem); err != nil {
				return nil, err
			}
			if err := f.refit(ctx, problem); err != nil {
				return nil, err
			}
			if best == nil || cost(f.residuals) < cost(best.residuals)*(1-1e-6) {
				best = f
			}
		}
	}
	return best, nil
}

func kvResiduals(p *sim.Profile, sizes []kvSize) []float64 {
	residuals := make([]float64, len(sizes))
	for i, s := range sizes {
		residuals[i] = (p.KVGiB(s.options) - s.gib) / kvError
	}
	return residuals
}

// rootMeanSquare returns the root mean square error of the predicted KV sizes, in GiB.
func rootMeanSquare(p *sim.Profile, sizes []kvSize) float64 {
	sum := 0.0
	for _, r := range kvResiduals(p, sizes) {
		sum += r * r
	}
	return kvError * math.Sqrt(sum/float64(len(sizes)))
}

// boundReserve sets memory.graph_reserve, the memory that must be free outside --gpu-memory-utilization. Starts that
// ran out of memory had less free memory than this; starts that succeeded had at least as much.
func (c *calibration) boundReserve(p *sim.Profile) {
	const path = "memory.graph_reserve"
	low, high := 0.0, math.Inf(1)
	for _, t := range c.Study.Trials {
		o, err := optionsOf(p, t)
		if err != nil {
			continue // the method choose reports this error
		}
		outside := (1 - o.GPUMemoryUtilization) * p.Memory.GPUGiB
		switch {
		case t.Result.Class == serverctl.OOMStart:
			low = max(low, outside)
		case t.Result.Facts.KVCacheTokens > 0:
			high = min(high, outside)
		}
	}
	reserve := p.Memory.GraphReserveGiB
	switch {
	case low >= high:
		c.note("some starts ran out of memory although gpu-memory-utilization left %.2f GiB free, but others had enough with %.2f GiB: %s stays %.3g GiB", low, high, path, min(reserve, high))
		c.set(p, path, min(reserve, high), "assumed", "starts that ran out of memory and starts that did not contradict each other")
	case low == 0 && math.IsInf(high, 1):
		c.held(p, path, "no start shows it")
	case reserve > low && reserve <= high:
		c.held(p, path, "the starts show only that it is between %.3g and %.3g GiB", low, high)
	case math.IsInf(high, 1):
		c.set(p, path, 1.05*low, "assumed", "a start ran out of memory although gpu-memory-utilization left %.3g GiB free, and no start had more free", low)
	default:
		c.set(p, path, (low+high)/2, "solved", "a start ran out of memory although gpu-memory-utilization left %.3g GiB free, and no start did with %.3g GiB or more free", low, high)
	}
}

// median returns the median. If there are two middle values, it returns their mean.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}
