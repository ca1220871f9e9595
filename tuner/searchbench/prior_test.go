package searchbench

import (
	"context"
	"math/rand/v2"

	"vllmtuner/serverctl/sim"
	"vllmtuner/studies"
	"vllmtuner/tuner/forecast"
	"vllmtuner/tuner/plan"
)

// A prior says what a study knows about the points before it measures them.
type prior int

const (
	none     prior = iota
	similar        // what the simulator predicts with profiles whose constants are off by up to 20 %
	shuffled       // the same capacities, each at another point
)

// priorError is the largest relative error of the constants of a profile.
const priorError = 0.2

// distorted has the names of the profile's constants that decide how the capacity depends on the searched flags.
var distorted = []string{
	"step.fixed", "step.weights", "step.per_token", "step.per_sequence", "step.per_kv_token", "step.per_attention_pair",
	"step.prefill_extra", "memory.activation", "memory.sampler_per_sequence", "memory.batch_per_token",
}

// predictor returns the study's Predict function. A world on the simulator has one of the built-in profiles. With exact
// constants the simulator would know the answers, so the constants are distorted first.
func (b prior) predictor(p *plan.Plan, seed uint64) (func(context.Context, studies.Study) ([]studies.Trial, string, error), error) {
	if b == none {
		return nil, nil
	}
	f, err := forecast.New(p)
	if f == nil || err != nil {
		return nil, err
	}
	r := rand.New(rand.NewPCG(seed, 7))
	for _, profile := range f.Profiles {
		distort(profile, r)
	}
	return func(ctx context.Context, study studies.Study) ([]studies.Trial, string, error) {
		trials, note, err := f.Priors(ctx, study)
		if b == shuffled {
			r.Shuffle(len(trials), func(i, j int) {
				trials[i].Result, trials[j].Result = trials[j].Result, trials[i].Result
			})
		}
		return trials, note, err
	}, nil
}

func distort(p *sim.Profile, r *rand.Rand) {
	for _, path := range distorted {
		*p.Value(path) *= 1 + priorError*(2*r.Float64()-1)
	}
}
