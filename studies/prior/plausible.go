package prior

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/bench"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// The requests per second that are taken for those of a server: none answers a million, and at one in 11 days nobody has waited for the second.
const (
	leastRate = 1e-6
	mostRate  = 1e6
)

// The milliseconds that are taken for a server's latency: a nanosecond, and 11 days, which nobody has waited.
const (
	leastMS = 1e-6
	mostMS  = 1e9
)

// mostInFlight is more requests than any workload has at once.
const mostInFlight = 1e7

// mostLog is the most that the logarithm of a ratio of two rates, or of two latencies, can be: e^40 are seven years in nanoseconds.
const mostLog = 40

// implausible says why what was read cannot have been measured, or cannot be stored; "" where it can.
func implausible(result trial.Result, probes []trial.Probe) string {
	return cmp.Or(implausibleResult(result), implausibleProbes(probes), unstorable(studies.Trial{Result: result, Probes: probes}))
}

// implausibleRun is implausible of a probe that has no result yet.
func implausibleRun(p trial.Probe) string {
	probes := []trial.Probe{p}
	return cmp.Or(implausibleProbes(probes), unstorable(studies.Trial{Probes: probes}))
}

func unstorable(t studies.Trial) string {
	if err := studies.CheckPrior(t); err != nil {
		return err.Error() + "; correct it where it was written"
	}
	return ""
}

var (
	outcomes = []trial.Outcome{trial.Measured, trial.Infeasible, trial.Dropped, trial.Unknown}
	bounds   = []capacity.Bound{capacity.Exact, capacity.AtLeast, capacity.AtMost}
)

// implausibleResult is implausible of what a trial came to. A trial that was not measured may have no capacity at all.
func implausibleResult(result trial.Result) string {
	c := result.Capacity
	isMeasured := result.Outcome == trial.Measured
	switch {
	case !slices.Contains(outcomes, result.Outcome):
		return notAWord("outcome", result.Outcome, outcomes)
	case !slices.Contains(bounds, c.Bound) && (isMeasured || c.Bound != ""):
		return notAWord("bound", c.Bound, bounds)
	case isMeasured && !(c.Rate >= leastRate && c.Rate <= mostRate):
		return notARate("capacity", c.Rate)
	}
	for _, bound := range []float64{c.Rate, c.Low, c.High, c.Lowest, c.Highest} { // 0 where there is none
		if !within(bound, 0, mostRate) {
			return notARate("capacity, or a bound of it,", bound)
		}
	}
	return cmp.Or(notWithin("requests in flight", c.InFlight, 0, mostInFlight), notWithin("standard error of ln capacity", c.StdErr, 0, mostLog),
		notWithin("number of probes", float64(c.Probes), 0, math.MaxInt32), implausibleParts(c))
}

// implausibleParts is implausible of what a capacity rests on.
func implausibleParts(c capacity.Capacity) (why string) {
	for _, p := range c.Pieces {
		why = cmp.Or(why, notWithin("part of the standard error", p.Moved, -mostLog, mostLog))
	}
	for i, s := range c.Steps {
		if !within(s.Rate, 0, mostRate) {
			why = cmp.Or(why, notARate(fmt.Sprintf("step %d", i), s.Rate))
		}
		why = cmp.Or(why, notWithin(fmt.Sprintf("step %d: requests in flight", i), s.InFlight, 0, mostInFlight),
			notWithin(fmt.Sprintf("step %d: headroom", i), s.Headroom, -mostLog, mostLog))
	}
	return why
}

// implausibleProbes is implausible of the rates and latencies of probes.
func implausibleProbes(probes []trial.Probe) string {
	for _, p := range probes {
		name := fmt.Sprintf("probe %d", p.Seq)
		if !within(p.Rate, 0, mostRate) {
			return notARate(name, p.Rate)
		}
		m := p.Measurement
		for _, of := range []struct {
			metric slo.Metric
			stats  bench.Stats
		}{{slo.TTFT, m.TTFT}, {slo.TPOT, m.TPOT}, {slo.ITL, m.ITL}, {slo.E2E, m.E2E}} {
			if value, ok := latency(of.stats); !ok {
				return notALatency(fmt.Sprintf("its %s: a figure of %s", name, strings.ToUpper(string(of.metric))), value)
			}
		}
		for _, c := range p.Verdict.Checks {
			if !isLatency(c.ValueMS) {
				return notALatency(fmt.Sprintf("its %s: %.40s", name, c.Limit), c.ValueMS)
			}
		}
	}
	return ""
}

// latency finds the figure that no server has; ok is true where there is none.
func latency(s bench.Stats) (value float64, ok bool) {
	for _, value := range []float64{s.Mean, s.P50, s.P90, s.P95, s.P99, s.P999, s.Max} {
		if !isLatency(value) {
			return value, false
		}
	}
	return s.Std, within(s.Std, 0, mostMS) // of equal latencies it is the error of its own sum
}

// isLatency reports whether a figure is one of a server, or 0, which is no figure.
func isLatency(ms float64) bool { return ms == 0 || within(ms, leastMS, mostMS) }

// within is false of what is no number.
func within(v, least, most float64) bool { return v >= least && v <= most }

func notWithin(what string, v, least, most float64) string {
	if within(v, least, most) {
		return ""
	}
	return fmt.Sprintf("its %s: %.4g, and it can be from %g to %g; correct it where it was written", what, v, least, most)
}

func notALatency(what string, ms float64) string {
	return fmt.Sprintf("%s is %.4g ms, and a server's is from %g to %g; correct it where it was written", what, ms, leastMS, mostMS)
}

func notAWord[T ~string](what string, is T, known []T) string {
	all := make([]string, len(known))
	for i, word := range known {
		all[i] = string(word)
	}
	return fmt.Sprintf("its %s is %.40q, and it can be %s; correct it where it was written", what, string(is), strings.Join(all, ", "))
}

func notARate(what string, rate float64) string {
	return fmt.Sprintf("its %s is at %.4g requests per second, and a server's is from %g to %.0f; correct it where it was written", what, rate, leastRate, mostRate)
}

// brief writes a number of very many digits, which may be anything in a file, as one that can be printed.
func brief(text string) string {
	const most = 24 // more than any number needs
	v, err := strconv.ParseFloat(text, 64)
	if len(text) <= most || err != nil && !math.IsInf(v, 0) {
		return text
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
