package trial

import (
	"time"

	"vllmtuner/bench/workload"
	"vllmtuner/trial/slo"
)

// DefaultLeadIn is how long a probe's load goes on before requests are counted, unless the user sets it. It lasts as
// long as two requests may take, so that as many are in flight as in the long run. The limits and the mean length of an
// answer say how long a request may take at the capacity.
//
// A cache that is carried from probe to probe needs twice as long until its contents are as in the long run. On a
// simulated H200, with answers of 500 tokens at 60 ms and windows of two minutes, capacities read 7 % too high after a
// lead-in of 60 s, 4 % after 120 s, and no better after 180 s.
func DefaultLeadIn(s slo.SLO, source workload.Source, cache Protocol) time.Duration {
	const shortest, longest, lifetimes = 30 * time.Second, 150 * time.Second, 2
	leadIn := min(max(shortest, lifetimes*s.MayTake(meanAnswer(source))), longest)
	if cache != Reset {
		leadIn *= 2
	}
	return leadIn.Round(time.Second)
}

// meanAnswer is the mean length of the workload's answers in tokens.
func meanAnswer(source workload.Source) float64 {
	n := 512
	if source.Len() > 0 {
		n = min(n, source.Len())
	}
	sum := 0
	for i := range n {
		sum += source.Request(workload.PopulationStream, i).OutputTokens
	}
	return float64(sum) / float64(n)
}
