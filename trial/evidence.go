package trial

import (
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// reach is how long after the last counted request others still meet it: four times the longest kernel's tau.
const reach = 80 * time.Second

// EvidenceOf is what a probe says of each of its requests: the load that each met, which follows from the schedule alone, and
// whether it broke a limit. draw is that of the schedule. It is nil where a limit is not judged request by request.
func EvidenceOf(schedule workload.Schedule, w *workload.Weigher, rate float64, draw int, s slo.SLO, v slo.Verdict) *capacity.Evidence {
	e := &capacity.Evidence{Rate: rate, Draw: draw}
	for a := range workload.Before(schedule, reach) {
		switch a.Phase {
		case workload.LeadIn:
			e.First++
		case workload.Window:
			e.Counted++
		}
		e.Due = append(e.Due, a.Due.Seconds())
		prompt, answer := w.Sizes(a.Request)
		e.Prompt, e.Answer = append(e.Prompt, prompt), append(e.Answer, answer)
	}
	for i, c := range v.Checks {
		e.Counted = min(e.Counted, len(c.Each)) // a probe that ended early has sent fewer than it planned
		if c.Each == "" || i >= len(s.Limits) {
			return nil
		}
		e.Limits = append(e.Limits, capacity.LimitEvidence{Name: c.Limit, Allowed: 1 - s.Limits[i].Percentile/100, Each: c.Each})
	}
	return e
}

// longRunRequests are so many that their own chance does not matter; see capacity.Population.
const longRunRequests = 128_000

// PopulationOf is what the plan's workload brings in the long run.
func PopulationOf(p workload.Plan, w *workload.Weigher) *capacity.Population {
	population := &capacity.Population{Due: p.LongRun(longRunRequests)}
	population.Prompt, population.Answer = w.LongRun(longRunRequests)
	// What is left of chance in the means would shift every capacity.
	toMean(population.Due, population.Due[longRunRequests-1]/longRunRequests)
	toMean(population.Prompt, mean(population.Prompt))
	toMean(population.Answer, mean(population.Answer))
	return population
}

func mean(values []float64) (sum float64) {
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// toMean divides the values by their mean.
func toMean(values []float64, mean float64) {
	for i := range values {
		values[i] /= mean
	}
}
