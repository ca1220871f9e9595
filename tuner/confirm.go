package tuner

import (
	"slices"

	"github.com/samber/lo"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

// unconfirmed returns the next point to confirm, or false when none is left: the best points of the search, and the
// default, with which the user compares them. Each is measured once more, on a fresh server with requests that no trial
// of the search had and with longer probes. The search chose its best among many by the same requests, so its figure is
// partly luck; this one is not.
func (s *Study) unconfirmed(study studies.Study) (space.Point, bool) {
	now := study.Present()
	if s.Confirm <= 0 || s.Budget.GPUTime > 0 && spent(study) >= s.Budget.GPUTime {
		return nil, false
	}
	searched := now
	searched.Trials = searchTrials(now.Trials)
	for _, p := range s.finalists(searched) {
		if !isConfirmed(now, p) {
			return p, true
		}
	}
	return nil, false
}

// A promiser is a sampler that knows how much its next point may gain, in ln(capacity).
type promiser interface {
	Promise(number int, history []studies.Trial) float64
}

// minSearched trials must be finished before a search ends because nothing promises more.
const minSearched = 10

// promisesLittle reports whether the sampler expects less than the smallest gain that is worth more GPU time.
func (s *Study) promisesLittle(study studies.Study) bool {
	now := study.Present()
	now.Trials = searchTrials(now.Trials)
	p, ok := s.Sampler.(promiser)
	if !ok || s.Budget.MinGain <= 0 || len(now.Trials) < minSearched {
		return false
	}
	return p.Promise(len(study.Trials), history(now)) < s.Budget.MinGain
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

// confirm sets how a point is confirmed. The first finalist gets its own capacity. The others race against it, because
// nobody needs the exact capacity of a loser. So does the default, if it may be as good; otherwise its capacity is only
// wanted for the gain, and may be rough.
func (s *Study) confirm(task *trial.Task, t *studies.Trial, now studies.Study) {
	task.Confirm, task.Draw = true, firstConfirmingDraw
	rate := rateOf(now, t.Point)
	task.Hint = func() float64 { return rate }
	best, found := confirmedBest(now, t.Version)
	switch {
	case !found || s.Budget.MinGain <= 0:
	case len(t.Point) == 0 && rate < noRival*rateOf(now, best.Point):
		task.Roughly = true
	default:
		task.Best = func() trial.Rival {
			best, _ := confirmedBest(now, t.Version)
			return rivalOf(best)
		}
	}
}

// noRival is the part of the best capacity below which the search shows that a server is worse. Two capacities of one
// search differ by 8 % when their servers are equal (standard deviation, simulated H200).
const noRival = 0.85

// confirmedBest returns the best confirmed trial on servers of a version.
func confirmedBest(now studies.Study, version string) (best studies.Trial, found bool) {
	for _, t := range now.Trials {
		better := !found || t.Result.Capacity.Carried() > best.Result.Capacity.Carried()
		if t.Origin == studies.Confirmed && t.State == studies.Done && t.Met() && better && (version == "" || t.Version == version) {
			best, found = t, true
		}
	}
	return best, found
}

// isConfirmed reports whether a confirming trial of the point was begun.
func isConfirmed(study studies.Study, p space.Point) bool {
	return slices.ContainsFunc(study.Trials, func(t studies.Trial) bool {
		return t.Origin == studies.Confirmed && t.Point.String() == p.String()
	})
}

// searchTrials returns the trials that are no confirmation. Those have other requests and longer probes, so that their
// capacities do not compare with the others'.
func searchTrials(trials []studies.Trial) []studies.Trial {
	return lo.Filter(trials, func(t studies.Trial, _ int) bool { return t.Origin != studies.Confirmed })
}

// firstConfirmingDraw is far above every draw that a search uses.
const firstConfirmingDraw = 1 << 18

// rateOf returns the capacity that the search found for a point; 0 if it found none.
func rateOf(study studies.Study, p space.Point) (rate float64) {
	for _, t := range searchTrials(study.Trials) {
		if t.Met() && t.Point.String() == p.String() {
			rate = t.Result.Capacity.Rate
		}
	}
	return rate
}
