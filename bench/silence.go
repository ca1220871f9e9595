package bench

import "slices"

// leastSilence is how many seconds without a token make a silence. At the busiest a server makes some in each.
const leastSilence = 2

// Silent reports whether the run ended, or passed as a whole, without a token though requests had been sent. That is a server which hangs,
// fails them all, or is slow: to send it one more request tells.
func (r Run) Silent() bool {
	if r.Tally != nil && r.Tally.total.completed > 0 || r.Tally == nil && !slices.ContainsFunc(r.Samples, func(s Sample) bool { return !s.OK() }) {
		return false
	}
	if len(r.Series) == 0 { // a load that keeps none
		return !slices.ContainsFunc(r.Samples, func(s Sample) bool { return s.First > 0 })
	}
	quiet := 0
	for _, s := range slices.Backward(r.Series) {
		if s.Chunks > 0 {
			break
		}
		if s.InFlight+s.Failed > 0 {
			quiet++
		}
	}
	tokens := slices.ContainsFunc(r.Series, func(s Second) bool { return s.Chunks > 0 })
	return !tokens || quiet >= leastSilence
}
