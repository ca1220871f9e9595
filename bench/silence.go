package bench

import "slices"

// minSilence is the number of seconds without a token after which a server counts as silent. Even an overloaded server
// makes tokens each second.
const minSilence = 2

// Silent reports whether the server completed no request of the run, or generated no token in the last seconds of the
// run. Such a server hangs, fails all requests, or is slow. One more request shows which of these is the case.
func (r Run) Silent() bool {
	if r.Tally != nil && r.Tally.total.completed > 0 || r.Tally == nil && !slices.ContainsFunc(r.Samples, func(s Sample) bool { return !s.OK() }) {
		return false
	}
	if len(r.Series) == 0 { // some load generators keep no series
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
	return !completed || quiet >= minSilence
}
