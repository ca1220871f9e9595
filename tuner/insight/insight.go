// Package insight says what a study knows besides its best trial: which flag mattered, how flat the optimum is, and
// which simpler flags are nearly as good. It never measures, and never changes which trial is the best.
package insight

import (
	"math/rand/v2"
	"slices"

	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

const (
	// minTrials is the smallest number of trials with a capacity for which the model is used. With fewer trials, the
	// model's answers mostly repeat its assumptions from before the study.
	minTrials = 6
	// maxTrials is the largest number of trials that the model learns from. The time of the model grows as the cube of
	// this number.
	maxTrials = 100
	// draws is the number of functions that are drawn from the model. The lowest and the highest of 40 draws are the
	// ends of an interval of 95 %.
	draws = 40
)

// Whole returns the numbers of the trials that Derive needs in full, for studies.ReadSummary. In a long study, Derive
// does not use the full results of most trials, because reading them takes longer than the rest of the report.
func Whole(study studies.Study) []int {
	numbers := report.Whole(0)(study)
	all := len(study.Trials) <= maxTrials
	for _, t := range study.Trials {
		reference := t.Origin == studies.Default || t.Origin == studies.Current // values that the server of such a trial reports complete its point
		if (all || reference) && !slices.Contains(numbers, t.Number) {
			numbers = append(numbers, t.Number)
		}
	}
	return numbers
}

// Derive returns what the trials of a study say about its space. Only the study's own trials in the deciding world
// count: no priors, and no predictions of the simulator. Derive returns nil if there is nothing to say: no trial met
// the SLO, or the space has changed since the best trial.
//
// The answer depends on the study alone.
func Derive(study studies.Study, s *space.Space) *report.Insight {
	best, met := report.Best(study)
	worlds := study.Worlds()
	if !met || study.Deciding() != len(worlds) || len(s.Parameters()) == 0 {
		return nil
	}
	o := study.DecidingObjective()
	now, winner := o.Judged(worlds[len(worlds)-1]), o.Judged([]studies.Trial{best.Trial, best.Found})
	i := &report.Insight{Nearly: nearly(s, report.Winner{Trial: winner[0], Found: winner[1]}, studies.Pooled(now))}
	if n := i.Nearly; n != nil {
		n.Rate *= o.Factor(trialOf(now, n.Trial))
	}
	searched := thinned(slices.DeleteFunc(slices.Clone(now), func(t studies.Trial) bool {
		return t.Origin == studies.Confirmed || t.State != studies.Done || !t.Counts()
	}), best.Found.Number)
	m := sampler.NewModel(s, study.Seed, searched)
	if m == nil || m.Values() < minTrials {
		return i
	}
	i.Mattered = mattered(s, m, rand.New(rand.NewPCG(study.Seed, 1)))
	i.Flat = flat(s, m, best.Found, rand.New(rand.NewPCG(study.Seed, 2)))
	return i
}

// trialOf returns the trial with the given number. The trials must include it.
func trialOf(trials []studies.Trial, number int) studies.Trial {
	return trials[slices.IndexFunc(trials, func(t studies.Trial) bool { return t.Number == number })]
}

// thinned returns at most maxTrials of the trials, evenly spaced. The trial with the number best is always among them.
func thinned(trials []studies.Trial, best int) []studies.Trial {
	if len(trials) <= maxTrials {
		return trials
	}
	var kept []studies.Trial
	for i := range maxTrials {
		kept = append(kept, trials[i*len(trials)/maxTrials])
	}
	if i := slices.IndexFunc(trials, func(t studies.Trial) bool { return t.Number == best }); i >= 0 &&
		!slices.ContainsFunc(kept, func(t studies.Trial) bool { return t.Number == best }) {
		kept[i*maxTrials/len(trials)] = trials[i]
	}
	return kept
}
