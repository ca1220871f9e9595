package tuner

import (
	"slices"

	"github.com/samber/lo"

	"vllmtuner/studies"
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
