package tuner

import (
	"slices"
	"time"

	"vllmtuner/studies"
	"vllmtuner/trial"
)

const (
	// maxTrialCost is the most GPU time that a trial may take, as a multiple of the GPU time of the median trial. On a
	// hopeless point, a search tries lower and lower rates. This limit ends the search, and the trial keeps what it has
	// measured.
	maxTrialCost = 5
	// minPriced is how many trials must have measured something before the median is used.
	minPriced = 3
	// unpricedTrial is the limit while fewer than minPriced trials have measured something. A search that has no hint
	// where to begin takes six probes. At a low rate, each probe takes ten minutes.
	unpricedTrial = 2 * time.Hour
)

// trialBudget is the GPU time that the next trial may take. It is a multiple of the median trial, but no more than is
// left of the study's budget. It is at least one second, because 0 means no limit.
func (s *Study) trialBudget(study studies.Study, origin studies.Origin) time.Duration {
	var priced []time.Duration
	for _, t := range study.Present().Trials {
		if t.State == studies.Done && (t.Result.Outcome == trial.Measured || t.Result.Outcome == trial.Dropped) {
			priced = append(priced, t.Result.GPUTime)
		}
	}
	most := unpricedTrial
	if n := len(priced); n >= minPriced && origin != studies.Confirmed { // a confirmation has longer probes
		slices.Sort(priced)
		most = maxTrialCost * priced[n/2]
	}
	if s.Budget.GPUTime > 0 {
		most = min(most, s.Budget.GPUTime-spent(study))
	}
	return max(most, time.Second)
}

// spent is the GPU time of the finished trials.
func spent(study studies.Study) (sum time.Duration) {
	for _, t := range study.Trials {
		if t.State == studies.Done && t.Counts() {
			sum += t.Result.GPUTime
		}
	}
	return sum
}
