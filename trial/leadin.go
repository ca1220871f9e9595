package trial

import (
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/slo"
)

// DefaultLeadIn is how long a probe's load goes on before requests are counted, unless a user says otherwise: as long as a few requests
// take, so that as many are in flight as in the long run. How long one takes is not known beforehand, but how long it may at the rate
// that is looked for: the limits say it, with the mean length of the answers. A cache that is carried from probe to probe takes twice as
// long until it holds what it does in the long run: with answers of 500 tokens at 60 ms capacities read 7 % too high on a simulated H200
// after 60 s of lead-in, 4 % after 120 s, and no better after 180 s, in windows of two minutes.
func DefaultLeadIn(s slo.SLO, source workload.Source, cache Protocol) time.Duration {
	const least, most, lifetimes = 30 * time.Second, 150 * time.Second, 2
	leadIn := min(max(least, lifetimes*s.MayTake(meanAnswer(source))), most)
	if cache != Reset {
		leadIn *= 2
	}
	return leadIn.Round(time.Second)
}

// meanAnswer is the mean length of the workload's answers in tokens.
func meanAnswer(source workload.Source) float64 {
	const looked = 512
	n := looked
	if source.Len() > 0 {
		n = min(n, source.Len())
	}
	sum := 0
	for i := range n {
		sum += source.Request(workload.PopulationStream, i).OutputTokens
	}
	return float64(sum) / float64(n)
}
