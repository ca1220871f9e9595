package tuner

import (
	"math"
	"slices"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// untriedPrior returns a point that is worth a trial of its own because of what was measured elsewhere: the best one of a source of which
// no trial here has told yet. It is nil when there is none. One point of each source is enough: it may be the best, and it says how the
// figures of the source compare with ours.
func (s *Study) untriedPrior(study studies.Study) space.Point {
	for _, source := range sources(study) {
		legal := slices.DeleteFunc(slices.Clone(source), func(t studies.Trial) bool { return s.Space.Check(t.Point) != nil })
		if best, ok := highest(legal); ok && !told(study, best.Point) {
			return best.Point
		}
	}
	return nil
}

// sources are the priors by where they are from, in the order in which they were added.
func sources(study studies.Study) (all [][]studies.Trial) {
	index := map[string]int{}
	for _, t := range study.Prior {
		i, known := index[t.Source]
		if !known {
			i = len(all)
			index[t.Source] = i
			all = append(all, nil)
		}
		all[i] = append(all[i], t)
	}
	return all
}

// highest is the trial with the highest capacity, the first of equal ones; ok is false where none met the SLO.
func highest(trials []studies.Trial) (best studies.Trial, ok bool) {
	for _, t := range trials {
		if t.Met() && (!ok || t.Result.Capacity.Rate > best.Result.Capacity.Rate) {
			best, ok = t, true
		}
	}
	return best, ok
}

// told reports whether a trial of the point told something.
func told(study studies.Study, p space.Point) bool {
	return slices.ContainsFunc(study.Trials, func(t studies.Trial) bool {
		return t.Point.String() == p.String() && t.Result.Outcome != trial.Unknown
	})
}

// history is what the sampler learns from: what was measured elsewhere, as this study would have measured it, and then the study's own
// trials. A prior of a point that a trial has told of says no more.
func history(study studies.Study) []studies.Trial {
	study.Trials = slices.DeleteFunc(slices.Clone(study.Trials), func(t studies.Trial) bool { return !t.Counts() }) // they are tried again
	if len(study.Prior) == 0 {
		return study.Trials
	}
	var all []studies.Trial
	for _, source := range sources(study) {
		factor := scale(source, study)
		for _, t := range source {
			if !told(study, t.Point) {
				t.Result.Capacity.Rate *= factor
				all = append(all, t)
			}
		}
	}
	return append(all, study.Trials...)
}

// scale is what a capacity of a source must be multiplied with to be one of this study. Another tool has other windows, another load and
// often other limits, so that its capacities are off by a factor that says nothing of the points: it is the geometric mean of ours/theirs
// over the points that both have measured. Where there is none, the best of theirs counts as much as the best of ours, and no more.
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

// hint is where the next search begins: at the best capacity so far, of servers of the version; before there is one, at the lowest that was measured
// elsewhere at rates which are known. One that is far off may cost all probes of a search. 0 means that there is none.
func hint(study studies.Study, version string) float64 {
	same := slices.DeleteFunc(slices.Clone(study.Trials), func(t studies.Trial) bool { return t.Version != version })
	if best, ok := highest(same); ok {
		return best.Result.Capacity.Rate
	}
	least := 0.0
	for _, t := range study.Prior {
		if rate := t.Result.Capacity.Rate; t.Met() && len(t.Probes) > 0 && (least == 0 || rate < least) {
			least = rate
		}
	}
	return least
}
