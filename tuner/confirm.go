package tuner

import (
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
	var reference space.Point
	for _, t := range study.Trials {
		if t.Origin == studies.Default && t.Met() {
			reference = t.Point
		}
	}
	defer func() {
		if reference != nil && len(points) > 0 {
			points = append(points, reference)
		}
	}()
	for _, number := range sampler.Recommend(s.Space, study.Seed, history(study), len(study.Trials)) {
		for _, t := range study.Trials {
			if t.Number == number && t.Met() && len(points) < s.Confirm {
				points = append(points, t.Point)
			}
		}
	}
	return points
}

// isConfirmed reports whether a confirming trial of the point was begun.
func isConfirmed(study studies.Study, p space.Point) bool {
	for _, t := range study.Trials {
		if t.Origin == studies.Confirmed && t.Point.String() == p.String() {
			return true
		}
	}
	return false
}

// searchTrials returns the trials that are no confirmation. Those have other requests and longer probes, so that their
// capacities do not compare with the others'.
func searchTrials(trials []studies.Trial) (search []studies.Trial) {
	for _, t := range trials {
		if t.Origin != studies.Confirmed {
			search = append(search, t)
		}
	}
	return search
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
