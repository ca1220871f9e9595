package calibrate

import (
	"context"
	"math"
	"slices"

	"vllmtuner/serverctl/sim"
)

// A group is a set of constants that keep their proportions while a single factor scales them.
type group struct {
	what  string
	paths []string
}

// groups are the sets of constants that the first trial of a study can tell apart. Generated tokens show the first
// group, prompts show the second, and the latencies of an idle server show the third.
var groups = []group{
	{"the time per generated token", []string{"step.fixed", "step.weights", "step.per_sequence", "step.per_kv_token", "step.eager_extra"}},
	{"the time per prompt token", []string{"step.per_token", "step.per_attention_pair", "step.prefill_extra"}},
	{"the latency outside the engine", []string{"latency.before_scheduling", "latency.after_step"}},
}

const (
	// scaleWidth is the standard deviation of a factor's logarithm before the fit. A server with another model or
	// another GPU may well be four times slower than the server of the profile.
	scaleWidth = 2 * math.Ln2
	// scaleError is the smallest relative error that a prediction is assumed to have. A profile with the proportions of
	// another server predicts no better.
	scaleError = 0.05
)

// A Scaled is a profile that was scaled to the first trials of a study.
type Scaled struct {
	Profile *sim.Profile
	Misfit  float64 // root mean square of ln(predicted / measured) over the figures of the probes
}

// Scale adapts a profile to a study of very few trials, for example to its first trial. It solves the constants that
// the start-up logs determine. It scales whole groups of the other constants, because a few probes cannot tell single
// constants apart. If no probe can be compared with a prediction, the error is an *InputError.
func Scale(ctx context.Context, in Input) (Scaled, error) {
	c := &calibration{Input: in}
	c.result = Result{Study: in.Study.Name, From: in.From.Name, Trials: len(in.Study.Trials)}
	p := c.begin()
	if err := c.solveMemory(ctx, p); err != nil {
		return Scaled{}, err
	}
	c.acceptance(p)
	chosen := c.choose(p)
	if len(chosen) == 0 {
		return Scaled{}, refuse("no probe of study %s can be compared with a simulated one", in.Study.Name)
	}
	for _, one := range chosen {
		one.probes = firstAndLast(one.probes)
	}
	f := newStepFit(c, p, chosen)
	observed := rows(chosen, false)
	factors, low, high := make([]float64, len(groups)), make([]float64, len(groups)), make([]float64, len(groups))
	for k := range groups {
		low[k], high[k] = -3*scaleWidth, 3*scaleWidth
	}
	scaled := problem{low: low, high: high, step: difference, residuals: func(ctx context.Context, factors []float64) ([]float64, error) {
		return f.scaleResiduals(ctx, Quiet(scaledBy(p, factors)), observed, factors)
	}}
	residuals, _, err := scaled.minimise(ctx, factors, indexes(len(groups)))
	if err != nil {
		return Scaled{}, err
	}
	sum := 0.0
	for i, r := range residuals[:len(observed)] {
		miss := r * f.scaleNoise(observed[i])
		sum += miss * miss
	}
	return Scaled{scaledBy(p, factors), math.Sqrt(sum / float64(len(observed)))}, nil
}

// scaledBy returns a copy of a profile. In the copy, each group of constants is multiplied by its factor. The slice
// factors has the logarithms of the factors.
func scaledBy(p *sim.Profile, factors []float64) *sim.Profile {
	changed := *p
	changed.Constants = slices.Clone(p.Constants)
	for k, g := range groups {
		for _, path := range g.paths {
			*changed.Value(path) *= math.Exp(factors[k])
		}
	}
	return &changed
}

// scaleResiduals returns log(predicted / measured) / error for each row. After these it returns, for each factor, the
// distance from 1 in standard deviations.
func (c *stepFit) scaleResiduals(ctx context.Context, p *sim.Profile, of []row, factors []float64) ([]float64, error) {
	scales := make([]float64, len(metrics))
	for k := range scales {
		scales[k] = 1
	}
	residuals, err := c.residuals(ctx, p, of, scales)
	if err != nil {
		return nil, err
	}
	for i, r := range of {
		residuals[i] *= c.noise(r) / c.scaleNoise(r)
	}
	for _, f := range factors {
		residuals = append(residuals, f/scaleWidth)
	}
	return residuals, nil
}

// noise returns the standard deviation of the logarithm of a row's figure.
func (c *stepFit) noise(r row) float64 {
	return metrics[r.metric].noiseOf(c.chosen[r.candidate].probes[r.probe].Probe)
}

func (c *stepFit) scaleNoise(r row) float64 { return math.Hypot(c.noise(r), scaleError) }

// firstAndLast returns the first and the last used probe. Their rates differ most, and a replay of all probes of a fast
// server takes seconds.
func firstAndLast(probes []probe) []probe {
	used := slices.DeleteFunc(slices.Clone(probes), func(p probe) bool { return !p.used || p.heldOut })
	if len(used) > 2 {
		used = []probe{used[0], used[len(used)-1]}
	}
	return used
}
