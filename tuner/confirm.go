package tuner

import (
	"slices"

	"github.com/samber/lo"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// unconfirmed returns the next point to confirm, or false if none is left. The search's best points are confirmed, and
// so is the default, because the user compares the best points with the default. A confirmation measures a point once
// more: on a fresh server, with longer probes, and with requests that no trial of the search had. The search measured
// many points with the same requests and chose the best, so its figures for these points are partly luck. A
// confirmation has new requests, so its figures do not contain this luck.
func (s *Study) unconfirmed(study studies.Study) (space.Point, bool) {
	now := study.Present()
	if s.Confirm <= 0 || s.Budget.GPUTime > 0 && spent(study) >= s.Budget.GPUTime {
		return nil, false
	}
	searched := now
	searched.Trials = searchTrials(now.Trials)
	for _, p := range s.finalists(searched) {
		if confirmations(now, p) == 0 {
			return p, true
		}
	}
	return s.undecided(now)
}

// undecided returns the best confirmed point or the default, for one more confirmation. Both are confirmed in turn, and in
// each round with the same new requests. undecided returns false if no further round could decide (see
// capacity.Comparison.Open), if the default was not confirmed, or if one of the two capacities is only a bound.
func (s *Study) undecided(now studies.Study) (space.Point, bool) {
	best, found := bestConfirmation(now, "")
	byDefault, confirmed := lo.Find(studies.Pooled(now.Trials), func(t studies.Trial) bool {
		return t.Origin == studies.Confirmed && t.Met() && len(t.Point) == 0
	})
	if !found || !confirmed || len(best.Point) == 0 || best.Version != byDefault.Version {
		return nil, false
	}
	rounds := confirmations(now, space.Point{})
	switch n := confirmations(now, best.Point); {
	case n > rounds:
		return space.Point{}, true
	case n < rounds:
		return best.Point, true // the best point of the earlier rounds fell behind this one
	}
	o := now.Objective()
	gain, known := capacity.Compare(o.Of(best), o.Of(byDefault))
	gain = gain.Among(len(studies.Held(now.Trials)) - 1)
	if !known || rounds >= s.MaxRounds || !gain.Open(s.Budget.MinGain) {
		return nil, false
	}
	return best.Point, true
}

// A promiser is a sampler that can predict how much its next point may gain, in ln(capacity).
type promiser interface {
	Promise(number int, history []studies.Trial) float64
}

// minSearched is the least number of trials after which a search may end because no point promises enough gain. If the
// whole space was predicted, minPredicted is this number: the sampler then also learns from the predictions.
const minSearched, minPredicted = 10, 7

// promisesLittle reports whether the sampler expects its next point to gain less than Budget.MinGain.
func (s *Study) promisesLittle(study studies.Study) bool {
	now := study.Present()
	now.Trials = searchTrials(now.Trials)
	p, ok := s.Sampler.(promiser)
	least := minSearched
	if predictions(study) >= minPredictions {
		least = minPredicted
	}
	if !ok || s.Budget.MinGain <= 0 || len(now.Trials) < least {
		return false
	}
	// Only the search's trials count here, not the confirmations. The model's random draws depend on this number. With
	// another number after the first confirmation, the model could promise more, and the search could begin again.
	return p.Promise(len(now.Trials), history(now)) < s.Budget.MinGain
}

// finalists returns the points to confirm, the best first and the default last.
func (s *Study) finalists(study studies.Study) (points []space.Point) {
	for _, number := range sampler.Recommend(s.Space, study.Seed, history(study), len(study.Trials)) {
		i := slices.IndexFunc(study.Trials, func(t studies.Trial) bool { return t.Number == number })
		if i >= 0 && study.Trials[i].Met() && len(points) < s.Confirm {
			points = append(points, study.Trials[i].Point)
		}
	}
	met := func(t studies.Trial) bool { return t.Origin == studies.Default && t.Met() }
	if len(points) > 0 && slices.ContainsFunc(study.Trials, met) {
		points = append(points, space.Point{})
	}
	return points
}

// confirm sets how a point is confirmed. The first finalist is measured in full. The other finalists race against the
// best confirmation so far: a race ends once the point has clearly lost, as nobody needs the exact capacity of a loser.
// The default never races, because the error of its capacity is part of the error of the gain. But if it carries far less
// than the best, a rough capacity is enough: the gain is clear. After the first round, nothing races.
func (s *Study) confirm(task *trial.Task, t *studies.Trial, now studies.Study) {
	now.Trials = lo.Filter(now.Trials, func(earlier studies.Trial, _ int) bool { return earlier.Number < t.Number })
	round := confirmations(now, t.Point)
	task.Confirm, task.Draw = true, firstConfirmingDraw+round*drawsOfRound
	rate := rateOf(now, t.Point)
	task.Hint = func() float64 { return rate }
	best, found := bestConfirmation(now, t.Version)
	switch {
	case !found || s.Budget.MinGain <= 0 || round > 0:
	case len(t.Point) > 0:
		task.Best = func() trial.Rival {
			best, _ := bestConfirmation(now, t.Version) // once more, because the server has told its version by then
			return rivalFor(t, best, now.Objective())
		}
	default:
		o := now.Objective()
		task.Confirm = rate/o.Factor(*t) >= farBelow*o.Of(best).Carried()
	}
}

// farBelow is a fraction of the best capacity, as the objective counts it. A default below it is confirmed with the probes
// of a search. Its rates are low, so the longer probes of a confirmation would take most of the study's last hour.
const farBelow = 0.6

// bestConfirmation returns the best of the confirmations whose points kept the SLO in all their confirmations. If version
// is not "", it considers only servers of that version. Unlike Incumbent, it ignores the trials of the search, because
// their requests and windows differ. found is false if there is no such confirmation.
func bestConfirmation(now studies.Study, version string) (best studies.Trial, found bool) {
	o, held := now.Objective(), studies.Held(now.Trials)
	for _, t := range studies.Pooled(now.Trials) {
		better := !found || o.Of(t).Carried() > o.Of(best).Carried()
		if t.Origin == studies.Confirmed && t.Met() && held[t.Point.String()] && better && (version == "" || t.Version == version) {
			best, found = t, true
		}
	}
	return best, found
}

// confirmations returns the number of confirming trials of the point that were begun.
func confirmations(study studies.Study, p space.Point) int {
	return lo.CountBy(study.Trials, func(t studies.Trial) bool { return t.Origin == studies.Confirmed && t.Point.String() == p.String() })
}

// searchTrials returns the trials without the confirmations. A confirmation has other requests and longer probes, so
// its capacity cannot be compared with the capacities of the search.
func searchTrials(trials []studies.Trial) []studies.Trial {
	return lo.Filter(trials, func(t studies.Trial, _ int) bool { return t.Origin != studies.Confirmed })
}

// firstConfirmingDraw is the number of a confirmation's first draw (one set of random requests). It is far above the
// number of every draw that a search uses, so a confirmation has new requests.
const firstConfirmingDraw = 1 << 18

// drawsOfRound is more than the number of draws of any trial, so each round of confirmations has new requests.
const drawsOfRound = 1 << 10

// rateOf returns the capacity that the search found for a point; 0 if it found none.
func rateOf(study studies.Study, p space.Point) (rate float64) {
	for _, t := range searchTrials(study.Trials) {
		if t.Met() && t.Point.String() == p.String() {
			rate = t.Result.Capacity.Rate
		}
	}
	return rate
}
