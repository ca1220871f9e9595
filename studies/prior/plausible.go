package prior

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/bench"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// The range of plausible rates, in requests per second. The minimum is one request in 11 days.
const (
	minRate = 1e-6
	maxRate = 1e6
)

// The range of plausible latencies, in milliseconds: from a nanosecond to 11 days.
const (
	minMS = 1e-6
	maxMS = 1e9
)

// maxInFlight is more requests than any workload has at once.
const maxInFlight = 1e7

// maxLog limits the logarithm of the ratio of two rates or latencies. e^40 is the ratio of seven years to a nanosecond.
const maxLog = 40

// A figure is one number of a result, with the range in which it is plausible.
type figure struct {
	what      string
	value     float64
	unit      string
	low, high float64
	optional  bool // the value 0 is allowed: it means that there is no such figure
}

// problem says why a figure is implausible; "" if it is plausible. NaN is in no range.
func (f figure) problem() string {
	if f.value >= f.low && f.value <= f.high || f.optional && f.value == 0 {
		return ""
	}
	return fmt.Sprintf("its %s is %.4g%s, but must be from %.7g to %.7g; correct it in the program or file that wrote it", f.what, f.value, f.unit, f.low, f.high)
}

func requestRate(what string, value float64, optional bool) figure {
	return figure{what, value, " requests per second", minRate, maxRate, optional}
}

var (
	outcomes = []trial.Outcome{trial.Measured, trial.Infeasible, trial.Dropped, trial.Unknown}
	bounds   = []capacity.Bound{capacity.Exact, capacity.AtLeast, capacity.AtMost}
)

// whyImplausible says why a result cannot have been measured, or cannot be stored; "" if nothing is wrong. A result
// without a measurement needs no capacity.
func whyImplausible(result trial.Result, probes []trial.Probe) string {
	c := result.Capacity
	isMeasured := result.Outcome == trial.Measured
	switch {
	case !slices.Contains(outcomes, result.Outcome):
		return notAWord("outcome", result.Outcome, outcomes)
	case !slices.Contains(bounds, c.Bound) && (isMeasured || c.Bound != ""):
		return notAWord("bound", c.Bound, bounds)
	}
	figures := []figure{requestRate("capacity", c.Rate, !isMeasured)}
	for _, bound := range []float64{c.Low, c.High, c.Lowest, c.Highest} {
		figures = append(figures, requestRate("capacity, or a bound of it,", bound, true))
	}
	figures = append(figures,
		figure{"number of requests in flight", c.InFlight, "", 0, maxInFlight, false},
		figure{"standard error of ln capacity", c.StdErr, "", 0, maxLog, false},
		figure{"number of probes", float64(c.Probes), "", 0, math.MaxInt32, false})
	for _, p := range c.Pieces {
		figures = append(figures, figure{"part of the standard error", p.Moved, "", -maxLog, maxLog, false})
	}
	for i, s := range c.Steps {
		name := fmt.Sprintf("step %d", i)
		figures = append(figures, requestRate(name, s.Rate, true),
			figure{name + ": number of requests in flight", s.InFlight, "", 0, maxInFlight, false},
			figure{name + ": headroom", s.Headroom, "", -maxLog, maxLog, false})
	}
	for _, p := range probes {
		figures = append(figures, figuresOf(p)...)
	}
	for _, f := range figures {
		if why := f.problem(); why != "" {
			return why
		}
	}
	if err := studies.CheckPrior(studies.Trial{Result: result, Probes: probes}); err != nil {
		return err.Error() + "; correct it in the program or file that wrote it"
	}
	return ""
}

// figuresOf returns the rate and the latencies of a probe.
func figuresOf(p trial.Probe) []figure {
	name := fmt.Sprintf("probe %d", p.Seq)
	m := p.Measurement
	figures := []figure{requestRate(name, p.Rate, true)}
	latency := func(what string, ms float64) {
		figures = append(figures, figure{name + ": " + what, ms, " ms", minMS, maxMS, true})
	}
	for _, of := range []struct {
		metric slo.Metric
		stats  bench.Stats
	}{{slo.TTFT, m.TTFT}, {slo.TPOT, m.TPOT}, {slo.ITL, m.ITL}, {slo.E2E, m.E2E}} {
		what, s := "a figure of "+strings.ToUpper(string(of.metric)), of.stats
		for _, ms := range []float64{s.Mean, s.P50, s.P90, s.P95, s.P99, s.P999, s.Max} {
			latency(what, ms)
		}
		// The range of this figure begins at 0, because equal latencies have a standard deviation near 0.
		figures = append(figures, figure{name + ": " + what, s.Std, " ms", 0, maxMS, false})
	}
	for _, c := range p.Verdict.Checks {
		latency(fmt.Sprintf("%.40s", c.Limit), c.ValueMS)
	}
	return figures
}

func notAWord[T ~string](what string, is T, known []T) string {
	all := lo.Map(known, func(word T, _ int) string { return string(word) })
	return fmt.Sprintf("its %s is %.40q, but must be one of %s; correct it in the program or file that wrote it", what, string(is), strings.Join(all, ", "))
}

// brief shortens a number with very many digits, so that it can be printed. Files may contain anything.
func brief(text string) string {
	const maxDigits = 24 // more digits than any number needs
	v, err := strconv.ParseFloat(text, 64)
	if len(text) <= maxDigits || err != nil && !math.IsInf(v, 0) {
		return text
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
