package tuner

import (
	"slices"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

const (
	// maxFails is a limit: if the first maxFails probes of a trial have all failed, the trial ends. If these probes
	// begin at 2 req/s, they end near 0.1 req/s, where a probe of 300 requests takes 50 minutes.
	maxFails = 5
	// maxFailsAgain replaces maxFails while every earlier trial has failed at every rate. The trial then probes the
	// lowest of these rates.
	maxFailsAgain = 1
	// maxHopeless is a limit: if the first maxHopeless measured trials have all failed at every rate, the search ends.
	maxHopeless = 6
)

// lowestFailed returns the lowest rate at which a finished trial has failed. It returns 0 if no rate has failed, or if
// any trial has met the SLO.
func lowestFailed(study studies.Study) (rate float64) {
	for _, t := range study.Trials {
		switch c := t.Result.Capacity; {
		case t.Met():
			return 0
		case t.State == studies.Done && c.Bound == capacity.AtMost && (rate == 0 || c.Rate < rate):
			rate = c.Rate
		}
	}
	return rate
}

// hopeless reports whether all trials so far failed at every rate, and at least maxHopeless of them were measured.
func hopeless(finished []studies.Trial) bool {
	measured := 0
	for _, t := range finished {
		if t.Result.Outcome == trial.Measured {
			measured++
		}
	}
	return measured >= maxHopeless && !slices.ContainsFunc(finished, studies.Trial.Met)
}
