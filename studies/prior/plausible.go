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

// Plausible requests per second. The minimum is one request in 11 days.
const (
	minRate = 1e-6
	maxRate = 1e6
)

// Plausible latencies in milliseconds: from a nanosecond to 11 days.
const (
	minMS = 1e-6
	maxMS = 1e9
)

// maxInFlight is more requests than any workload has at once.
const maxInFlight = 1e7

// maxLog limits the logarithm of the ratio of two rates or latencies: e^40 nanoseconds are seven years.
const maxLog = 40

// implausible says why a result cannot have been measured, or cannot be stored; "" if it can.
func implausible(result trial.Result, probes []trial.Probe) string {
	return cmp.Or(implausibleResult(result), implausibleProbes(probes), unstorable(studies.Trial{Result: result, Probes: probes}))
}

// implausibleRun is implausible for a probe without a result.
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

// implausibleResult is implausible for the result of a trial. A trial that was not measured needs no capacity.
func implausibleResult(result trial.Result) string {
	c := result.Capacity
	isMeasured := result.Outcome == trial.Measured
	switch {
	case !slices.Contains(outcomes, result.Outcome):
		return notAWord("outcome", result.Outcome, outcomes)
	case !slices.Contains(bounds, c.Bound) && (isMeasured || c.Bound != ""):
		return notAWord("bound", c.Bound, bounds)
	case isMeasured && !(c.Rate >= minRate && c.Rate <= maxRate):
		return notARate("capacity", c.Rate)
	}
	for _, bound := range []float64{c.Rate, c.Low, c.High, c.Lowest, c.Highest} { // 0 stands for none
		if !within(bound, 0, maxRate) {
			return notARate("capacity, or a bound of it,", bound)
		}
	}
	return cmp.Or(notWithin("number of requests in flight", c.InFlight, 0, maxInFlight), notWithin("standard error of ln capacity", c.StdErr, 0, maxLog),
		notWithin("number of probes", float64(c.Probes), 0, math.MaxInt32), implausibleParts(c))
}

// implausibleParts is implausible for the pieces and steps of a capacity.
func implausibleParts(c capacity.Capacity) (why string) {
	for _, p := range c.Pieces {
		why = cmp.Or(why, notWithin("part of the standard error", p.Moved, -maxLog, maxLog))
	}
	for i, s := range c.Steps {
		if !within(s.Rate, 0, maxRate) {
			why = cmp.Or(why, notARate(fmt.Sprintf("step %d", i), s.Rate))
		}
		why = cmp.Or(why, notWithin(fmt.Sprintf("step %d: number of requests in flight", i), s.InFlight, 0, maxInFlight),
			notWithin(fmt.Sprintf("step %d: headroom", i), s.Headroom, -maxLog, maxLog))
	}
	return why
}

// implausibleProbes is implausible for the rates and latencies of probes.
func implausibleProbes(probes []trial.Probe) string {
	for _, p := range probes {
		name := fmt.Sprintf("probe %d", p.Seq)
		if !within(p.Rate, 0, maxRate) {
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

// latency returns the first implausible figure; ok is true if all are plausible.
func latency(s bench.Stats) (value float64, ok bool) {
	for _, value := range []float64{s.Mean, s.P50, s.P90, s.P95, s.P99, s.P999, s.Max} {
		if !isLatency(value) {
			return value, false
		}
	}
	return s.Std, within(s.Std, 0, maxMS) // equal latencies have a tiny Std, from rounding
}

// isLatency reports whether a latency is plausible. It may be 0, which stands for none.
func isLatency(ms float64) bool { return ms == 0 || within(ms, minMS, maxMS) }

// within reports whether v is in a range. NaN is in none.
func within(v, low, high float64) bool { return v >= low && v <= high }

func notWithin(what string, v, low, high float64) string {
	if within(v, low, high) {
		return ""
	}
	return fmt.Sprintf("its %s is %.4g, but must be from %g to %g; correct it where it was written", what, v, low, high)
}

func notALatency(what string, ms float64) string {
	return fmt.Sprintf("%s is %.4g ms, but must be from %g to %g; correct it where it was written", what, ms, minMS, maxMS)
}

func notAWord[T ~string](what string, is T, known []T) string {
	all := make([]string, len(known))
	for i, word := range known {
		all[i] = string(word)
	}
	return fmt.Sprintf("its %s is %.40q, but must be one of %s; correct it where it was written", what, string(is), strings.Join(all, ", "))
}

func notARate(what string, rate float64) string {
	return fmt.Sprintf("its %s is %.4g requests per second, but must be from %g to %.0f; correct it where it was written", what, rate, minRate, maxRate)
}

// brief shortens a number with very many digits, so that it can be printed. Files may contain anything.
func brief(text string) string {
	const maxDigits = 24 // more than any number needs
	v, err := strconv.ParseFloat(text, 64)
	if len(text) <= maxDigits || err != nil && !math.IsInf(v, 0) {
		return text
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
