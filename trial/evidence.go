package trial

import (
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// Requests that are due within reach after the last counted request can still affect it. reach is four times the
// longest time constant (tau) of the kernels in package capacity.
const reach = 80 * time.Second

// Evidence says for each request of a probe which load the request met, and whether the request broke a limit. The load
// follows from the schedule alone. The evidence is nil if a limit is not judged request by request.
func (l *LongRun) Evidence(
	schedule workload.Schedule, rate float64, draw int, s slo.SLO, v slo.Verdict,
) *capacity.Evidence {
	e := &capacity.Evidence{Rate: rate, Draw: draw}
	for a := range workload.Before(schedule, reach) {
		switch a.Phase {
		case workload.LeadIn:
			e.First++
		case workload.Window:
			e.Counted++
		}
		e.Due = append(e.Due, a.Due.Seconds())
		prompt, answer := l.weigher.Sizes(a.Request)
		e.Prompt, e.Answer = append(e.Prompt, prompt), append(e.Answer, answer)
	}
	for i, c := range v.Checks {
		e.Counted = min(e.Counted, len(c.Each)) // a probe that ended early has sent fewer requests than planned
		if c.Each == "" || i >= len(s.Limits) {
			return nil
		}
		limit := s.Limits[i]
		e.Limits = append(e.Limits, capacity.LimitEvidence{
			Name: c.Limit, Queue: limit.Metric == slo.TTFT, Allowed: 1 - limit.Percentile/100, Headroom: c.Headroom, Each: c.Each,
		})
	}
	return e
}

// A LongRun describes a workload in the long run. It is the same for every trial, so it is computed once.
type LongRun struct {
	weigher    *workload.Weigher
	Population *capacity.Population
}

// longRunRequests is the number of requests of a LongRun. With so many requests, chance hardly moves a capacity; see
// capacity.Population.
const longRunRequests = 128_000

// NewLongRun reads longRunRequests arrivals of the plan. It uses only the plan's source, seed and arrivals.
func NewLongRun(plan workload.Plan) *LongRun {
	w := workload.Weigh(plan.Source)
	p := &capacity.Population{Due: plan.LongRun(longRunRequests)}
	p.Prompt, p.Answer = w.LongRun(longRunRequests)
	// By chance the means are not exactly 1, which would shift every capacity. So toMean makes them 1.
	toMean(p.Due, p.Due[longRunRequests-1]/longRunRequests)
	toMean(p.Prompt, mean(p.Prompt))
	toMean(p.Answer, mean(p.Answer))
	return &LongRun{w, p}
}

// SharedLongRun returns the field LongRun. It builds the long run first if the field is nil.
func (r *Runner) SharedLongRun() *LongRun {
	if r.LongRun == nil {
		r.LongRun = NewLongRun(workload.Plan{Source: r.Source, Seed: r.Seed, Arrivals: r.Arrivals})
	}
	return r.LongRun
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
