package prior

import (
	"fmt"
	"math"
	"strconv"

	"vllmtuner/studies"
	"vllmtuner/trial"
)

// The requests per second that are taken for those of a server: none answers a million, and at one in 11 days nobody has waited for the second.
const (
	leastRate = 1e-6
	mostRate  = 1e6
)

// leastMS is a latency that is taken for a server's: a nanosecond.
const leastMS = 1e-6

// implausible says why what was read cannot have been measured, or cannot be stored; "" where it can.
func implausible(result trial.Result, probes []trial.Probe) string {
	c := result.Capacity
	if result.Outcome == trial.Measured && !(c.Rate >= leastRate && c.Rate <= mostRate) {
		return notARate("capacity", c.Rate)
	}
	for _, bound := range []float64{c.Rate, c.Low, c.High} { // 0 where there is none
		if !(bound >= 0 && bound <= mostRate) {
			return notARate("capacity, or a bound of it,", bound)
		}
	}
	for _, p := range probes {
		if !(p.Rate >= 0 && p.Rate <= mostRate) {
			return notARate(fmt.Sprintf("probe %d", p.Seq), p.Rate)
		}
	}
	if err := studies.CheckPrior(studies.Trial{Result: result, Probes: probes}); err != nil {
		return err.Error() + "; correct it where it was written"
	}
	return ""
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
