package trial

import (
	"fmt"
	"math"
	"strings"

	"vllmtuner/render"
	"vllmtuner/trial/capacity"
	"vllmtuner/trial/slo"
)

// DefaultMargin is the advised rate as a fraction of the capacity, unless the user sets another.
const DefaultMargin = 0.9

// An Advice is the rate at which to run a server: a fraction of its capacity. It also says what was measured near that
// rate.
type Advice struct {
	Rate   float64 `json:"rate"`   // requests per second
	Margin float64 `json:"margin"` // Rate / Base
	Base   float64 `json:"of"`     // the rate that Margin multiplies, requests per second
	Basis  Basis   `json:"basis"`  // says what kind of rate Base is

	ProbeRate float64         `json:"measured_at,omitempty"` // rate of the nearest probe, as Advise chooses it; 0 if there is none
	Kept      bool            `json:"kept"`                  // whether that probe kept the SLO
	Measured  []MeasuredLimit `json:"measured,omitempty"`    // limits of the SLO, with the values that this probe measured
}

// A Basis names the rate that is multiplied by the margin.
type Basis string

// The values of Basis.
const (
	LowerEnd    Basis = "lower end of the 95 % interval"
	HighestPass Basis = "highest rate that passed" // used if the capacity has no interval
)

// A MeasuredLimit is a limit of the SLO with its measured value.
type MeasuredLimit struct {
	Limit   string  `json:"limit"` // such as p99 TTFT
	MaxMS   float64 `json:"max_ms"`
	ValueMS float64 `json:"value_ms"`
}

// MeasuredLimits returns the limits of a verdict with their measured values.
func MeasuredLimits(v slo.Verdict) []MeasuredLimit {
	limits := make([]MeasuredLimit, len(v.Checks))
	for i, c := range v.Checks {
		limits[i] = MeasuredLimit{c.Limit, c.MaxMS, c.ValueMS}
	}
	return limits
}

// String writes a limit with its value, such as "p99 TTFT 711 of 1000 ms".
func (m MeasuredLimit) String() string {
	return fmt.Sprintf("%s %s of %s ms", m.Limit, render.Number(m.ValueMS), render.Number(m.MaxMS))
}

// MeasuredText writes limits with their values in one line.
func MeasuredText(limits []MeasuredLimit) string {
	words := make([]string, len(limits))
	for i, m := range limits {
		words[i] = m.String()
	}
	return strings.Join(words, ", ")
}

// nearRate is the relative distance within which two rates have about the same latencies.
const nearRate = 0.03

// Advise returns the rate at which to run a server. It multiplies the margin (0 to 1) by the lower end of the
// capacity's interval. If the capacity has no interval, Advise multiplies the margin by the highest rate that passed.
// The advice names the nearest probe within 3 % of the advised rate. If there is none, the advice names the nearest
// probe that passed at a higher rate. The advised rate is lower than the rate of that probe, so only by chance can it
// have higher latencies. If no rate passed while the load generator was on time, ok is false.
func Advise(c capacity.Capacity, margin float64, probes []Probe) (a Advice, ok bool) {
	if !c.Met() {
		return a, false
	}
	a = Advice{Margin: margin, Base: c.Lowest, Basis: LowerEnd}
	if a.Base <= 0 {
		a.Base, a.Basis = c.Low, HighestPass
	}
	if a.Base <= 0 {
		return a, false
	}
	a.Rate = capacity.ThreeDigits(margin * a.Base)
	nearest := math.Inf(1)
	for _, p := range probes {
		off := math.Log(p.Rate / a.Rate)
		near := math.Abs(off) <= nearRate
		if p.Rate <= 0 || p.Verdict.ClientLimited != "" || !near && (off < 0 || !p.Verdict.Pass) || math.Abs(off) > nearest {
			continue
		}
		nearest = math.Abs(off)
		a.ProbeRate, a.Kept, a.Measured = p.Rate, p.Verdict.Pass, MeasuredLimits(p.Verdict)
	}
	return a, true
}

// Near reports whether the probe that the advice names was made at about the advised rate.
func (a Advice) Near() bool {
	return a.ProbeRate > 0 && math.Abs(math.Log(a.ProbeRate/a.Rate)) <= nearRate
}

// String writes the advice with the values of its probe, such as "2.03 req/s = 0.9 × 2.26, the lower end; there p99
// TTFT 512 of 1000 ms, p99 TPOT 41 of 60 ms".
func (a Advice) String() string {
	of := "the lower end"
	if a.Basis == HighestPass {
		of = "the " + string(HighestPass)
	}
	text := fmt.Sprintf("%s req/s = %g × %s, %s; ", render.Number(a.Rate), a.Margin, render.Number(a.Base), of)
	switch {
	case a.ProbeRate == 0:
		return text + "no probe at or above this rate passed"
	case !a.Kept:
		return text + fmt.Sprintf("but %s req/s failed: %s", render.Number(a.ProbeRate), MeasuredText(a.Measured))
	case a.Near():
		return text + "there " + MeasuredText(a.Measured)
	}
	return text + fmt.Sprintf("at %s req/s, which passed, %s", render.Number(a.ProbeRate), MeasuredText(a.Measured))
}
