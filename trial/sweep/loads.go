package sweep

import (
	"slices"
	"strconv"

	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/loadtest"
)

// loads are the loads of a sweep in rising order: all of them rates, or all of them concurrencies.
type loads []trial.Level

// closed reports whether the levels are concurrencies of a closed loop.
func (l loads) closed() bool { return len(l) > 0 && l[0].Streams > 0 }

// varied returns what differs between the levels: concurrency or rate.
func (l loads) varied() string {
	if l.closed() {
		return "concurrency"
	}
	return "rate"
}

// loadWord returns a load as text for a table.
func (l loads) loadWord(load float64) string {
	if l.closed() {
		return strconv.Itoa(int(load))
	}
	return loadtest.RateText(load)
}

// next returns the verdict at the lowest failed load above the highest passed one. If there is no such load, it returns
// the reason.
func (l loads) next(c *Config, h capacity.Capacity) string {
	i := slices.IndexFunc(l, func(one trial.Level) bool { return one.Load() == h.High })
	switch {
	case h.Limited != "":
		return "client-limited"
	case h.Bound == "":
		return "not measured"
	case i < 0 && len(c.Probes) < len(l):
		return "not measured"
	case i < 0:
		return "none: the grid ends here"
	}
	p, _ := c.at(l[i])
	return l.loadWord(h.High) + " " + verdictCell(c, p)
}
