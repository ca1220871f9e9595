package studies

import (
	"slices"

	"vllmtuner/trial/capacity"
)

// Pooled returns the trials with the capacities of repeated confirmations pooled: each confirmation of a point that met
// the SLO gets the mean of all of them. Servers of another version count apart. If no point was confirmed twice, Pooled
// returns the trials themselves. Its result must not be pooled again.
func Pooled(trials []Trial) []Trial {
	type server struct{ point, version string }
	measured, repeated := map[server][]capacity.Capacity{}, false
	confirmed := func(t *Trial) (s server, ok bool) {
		if t.Origin != Confirmed || !t.Met() {
			return s, false
		}
		return server{t.Point.String(), t.Version}, true
	}
	for i := range trials {
		if s, ok := confirmed(&trials[i]); ok {
			repeated = repeated || len(measured[s]) > 0
			measured[s] = append(measured[s], trials[i].Result.Capacity)
		}
	}
	if !repeated {
		return trials
	}
	pooled := slices.Clone(trials)
	for i := range pooled {
		if s, ok := confirmed(&pooled[i]); ok {
			pooled[i].Result.Capacity, _ = pooled[i].Result.Capacity.Pooled(measured[s])
		}
	}
	return pooled
}

// Held says for each point that was confirmed whether all its confirmations kept the SLO. A point that lost the race
// against another confirmation did not.
func Held(trials []Trial) map[string]bool {
	held := make(map[string]bool)
	for _, t := range trials {
		if t.Origin == Confirmed && t.State == Done && t.Counts() {
			before, again := held[t.Point.String()]
			held[t.Point.String()] = t.Met() && (before || !again)
		}
	}
	return held
}
