package tuner

import (
	"math"
	"slices"

	"github.com/samber/lo"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// untriedPrior returns the best legal point of a source, such as another tool's results. It takes the first source
// whose best legal point this study has not yet measured. If there is no such source, it returns nil. One point of each
// source is enough: it may be the best point of all, and it shows how the source's figures compare with ours.
func (s *Study) untriedPrior(study studies.Study) space.Point {
	for _, source := range sources(asJudged(study)) {
		legal := slices.DeleteFunc(slices.Clone(source), func(t studies.Trial) bool { return s.Space.Check(t.Point) != nil })
		if best, ok := highest(legal); ok && !isMeasured(study, best.Point) {
			return best.Point
		}
	}
	return nil
}

// sources groups the priors by their source, in the order in which they were added.
func sources(study studies.Study) [][]studies.Trial {
	return lo.PartitionBy(study.Prior, func(t studies.Trial) string { return t.Source })
}

// highest returns the trial with the highest capacity. If several are equal, it returns the first. If no trial met the
// SLO, ok is false.
func highest(trials []studies.Trial) (best studies.Trial, ok bool) {
	for _, t := range trials {
		if t.Met() && (!ok || t.Result.Capacity.Rate > best.Result.Capacity.Rate) {
			best, ok = t, true
		}
	}
	return best, ok
}

// isMeasured reports whether this study has a trial of the point whose outcome is not Unknown.
func isMeasured(study studies.Study, p space.Point) bool {
	return slices.ContainsFunc(study.Trials, func(t studies.Trial) bool {
		return t.Point.String() == p.String() && t.Result.Outcome != trial.Unknown
	})
}

// history returns what the sampler learns from: the priors, scaled to this study, and then the study's own trials. All
// capacities are counted in the way of the study's objective. history leaves out priors whose point this study has
// measured. Predictions stay: the model compares them with the measurements.
func history(study studies.Study) []studies.Trial {
	study = asJudged(study)
	study.Trials = slices.DeleteFunc(slices.Clone(study.Trials), func(t studies.Trial) bool { return !t.Counts() }) // points of trials that do not count are tried again
	if len(study.Prior) == 0 {
		return study.Trials
	}
	var all []studies.Trial
	for _, source := range sources(study) {
		factor := scale(source, study)
		for _, t := range source {
			if t.Predicted() || !isMeasured(study, t.Point) {
				t.Result.Capacity.Rate *= factor
				all = append(all, t)
			}
		}
	}
	return append(all, study.Trials...)
}

// scale returns the factor that converts capacities of a source to this study. Another tool has other windows, another
// load and often other limits. So all its capacities differ from the study's capacities by about the same factor. If
// both have measured the same points, the factor is the geometric mean of study's capacity / source's capacity over
// these points. Otherwise the factor makes the best capacity of the source equal to the best capacity of the study.
func scale(source []studies.Trial, study studies.Study) float64 {
	sum, n := 0.0, 0
	for _, theirs := range source {
		for _, ours := range study.Trials {
			if theirs.Met() && ours.Met() && ours.Result.Class != serverctl.ClientLimited && theirs.Point.String() == ours.Point.String() {
				sum += math.Log(ours.Result.Capacity.Rate / theirs.Result.Capacity.Rate)
				n++
			}
		}
	}
	if n > 0 {
		return math.Exp(sum / float64(n))
	}
	best, ok := highest(source)
	ours, known := highest(study.Trials)
	if !ok || !known {
		return 1
	}
	return ours.Result.Capacity.Rate / best.Result.Capacity.Rate
}

// hint returns the rate at which the search of a trial begins: the best capacity so far on servers of the same version.
// If there is none, hint returns the lowest capacity of the priors with measured rates. The lowest is the safe choice:
// a hint that is far too high may cost all probes of a search. With the objective capacity_per_gpu, the best capacity
// is converted to the trial's number of GPUs. 0 means no hint.
func hint(study studies.Study, of *studies.Trial) float64 {
	study = asJudged(study)
	same := slices.DeleteFunc(slices.Clone(study.Trials), func(t studies.Trial) bool { return t.Version != of.Version })
	factor := study.Objective().Factor(*of)
	if best, ok := highest(same); ok {
		return best.Result.Capacity.Rate * factor
	}
	lowest := 0.0
	for _, t := range study.Prior {
		if rate := t.Result.Capacity.Rate; t.Met() && len(t.Probes) > 0 && (lowest == 0 || rate < lowest) {
			lowest = rate
		}
	}
	return lowest * factor
}
