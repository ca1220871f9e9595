package tuner

import (
	"slices"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

const (
	// maxFails probes of a trial may fail before the first passes. From a rate of 2 they lead to 0.1 req/s, where a probe of
	// 300 requests takes 50 minutes.
	maxFails = 5
	// maxFailsAgain is the limit while every earlier trial has failed at every rate. The trial then probes the lowest of
	// these rates.
	maxFailsAgain = 1
	// The search ends if the first maxHopeless measured trials have all failed at every rate.
	maxHopeless = 6
)

// lowestFailed returns the lowest rate that failed in a study in which nothing has passed; 0 if something has, and if
// nothing has failed.
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

// hopeless reports whether all trials so far failed at every rate, and there are enough of them to believe it of the rest.
func hopeless(finished []studies.Trial) bool {
	measured := 0
	for _, t := range finished {
		if t.Result.Outcome == trial.Measured {
			measured++
		}
	}
	return measured >= maxHopeless && !slices.ContainsFunc(finished, studies.Trial.Met)
}
