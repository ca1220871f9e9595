package bench

import "slices"

// leastSilence is how many seconds without a token make a silence. At the busiest a server makes some in each.
const leastSilence = 2

// Silent reports whether the run was sent requests and gave no token at its end, or completed not one of them. Such a server hangs, fails them
// all, or is slow: one more request tells which.
func (r Run) Silent() bool {
	if r.Tally != nil && r.Tally.total.completed > 0 || r.Tally == nil && !slices.ContainsFunc(r.Samples, func(s Sample) bool { return !s.OK() }) {
		return false
	}
	if len(r.Series) == 0 { // a load that keeps none
		return !slices.ContainsFunc(r.Samples, func(s Sample) bool { return s.OK() })
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
	completed := slices.ContainsFunc(r.Series, func(s Second) bool { return s.Ended > 0 })
	return !completed || quiet >= leastSilence
}
