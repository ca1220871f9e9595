package trial

import "vllmtuner/bench/workload"

// Cached is the share of a window's prompt tokens, 0 to 1, that a server finds in its prefix cache under the protocol.
// The cache is assumed to hold everything that is asked.
func Cached(plan workload.Plan, cache Protocol) float64 {
	c := newRecall(defaultKVTokens)
	schedule := plan.Schedule()
	switch n := plan.Source.Len(); {
	case cache == Reset:
		schedule = workload.WithColdLeadIn(schedule, plan.Source)
	case cache == Primed && n > 0:
		for i := range n {
			c.ask(plan.Source.Request(workload.PrimeStream, i))
		}
	default:
		for i := 0; c.tokens < defaultKVTokens/2 && i < maxPrimed; i++ {
			c.ask(plan.Source.Request(workload.PrimeStream, i))
		}
	}
	begun := false
	for a := range schedule {
		if a.Phase == workload.RunOut {
			break
		}
		if a.Phase == workload.Window && !begun {
			begun = true
			c.begin()
		}
		c.ask(a.Request)
	}
	carried, _ := c.rates()
	return carried
}

// maxPrimed is how many requests of an endless workload are read to find what they share. If they share everything, no
// number of requests fills a cache.
const maxPrimed = 2000
