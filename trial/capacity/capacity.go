// Package capacity finds the highest request rate that keeps the SLO, and how certain that rate is. The caller provides
// the function that probes a rate. The package has no clock and does no I/O.
package capacity

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// A Bound says whether a capacity is exact, or only a lower or upper bound.
type Bound string

// The bounds.
const (
	Exact   Bound = "exact"    // bracketed by a pass and a fail
	AtLeast Bound = "at least" // passed at the highest rate that was offered, or that the load generator could offer
	AtMost  Bound = "at most"  // failed at the lowest rate that was offered

	// Estimated is a rate with an interval, but without a bracket. A server that lost a race has such a capacity.
	Estimated Bound = "estimated"
)

// An Outcome is the result of one probe at one rate.
type Outcome struct {
	Pass     bool    `json:"pass"`
	Headroom float64 `json:"headroom"`  // ln(limit/value) of the limit that breaks first; negative when it is broken
	Binding  string  `json:"binding"`   // name of the limit that breaks first
	InFlight float64 `json:"in_flight"` // mean requests in flight

	// Limited says why the load generator, and not the server, may have decided the verdict; "" means that it did not.
	// With a late load generator a pass is at best a lower bound, because late requests make bursts smaller. A fail
	// then proves nothing.
	Limited string `json:"limited,omitempty"`

	// Evidence says what each request did. It is nil if requests are not judged one by one; the capacity then has no
	// interval.
	Evidence *Evidence `json:"-"`

	Seen float64 `json:"-"` // fraction of the window's requests that were due before the probe ended; 1 unless the probe ended early

	Took time.Duration `json:"-"` // how long the probe took; 0 where that is not known
}

// byRequests reports whether slow requests decided the verdict. Otherwise a failed request or a growing queue decided
// it.
func (o Outcome) byRequests() bool {
	return o.Evidence != nil && slices.ContainsFunc(o.Evidence.Limits, func(l LimitEvidence) bool { return l.Name == o.Binding })
}

// ErrLimited is returned by Find when the load generator could not offer even the lowest rate as planned.
var ErrLimited = errors.New("the load generator is the limit, not the server")

// A Probe measures one rate in requests per second. Its error ends the search.
type Probe func(ctx context.Context, rate float64) (Outcome, error)

// A Capacity is the result of a search.
type Capacity struct {
	Rate     float64 `json:"rate"` // requests per second; for AtMost the lowest failed rate, which is no capacity
	Low      float64 `json:"low"`  // highest rate up to Rate that passed, with the load generator on time; 0 when none did
	High     float64 `json:"high"` // lowest failed rate at or above Rate; 0 when there is none. If there is a Doubt, Rate may be slightly higher
	Bound    Bound   `json:"bound"`
	Binding  string  `json:"binding"`   // limit that breaks first
	InFlight float64 `json:"in_flight"` // requests in flight at Rate, interpolated between the neighbouring probes
	Probes   int     `json:"probes"`
	Why      string  `json:"why"` // why the search stopped

	// Lowest and Highest are the ends of the 95 % interval of the long-run capacity, requests per second. Both are 0 if
	// there is no interval. Highest is 0 if no probe failed.
	Lowest  float64 `json:"lowest,omitempty"`
	Highest float64 `json:"highest,omitempty"`
	StdErr  float64 `json:"std_err,omitempty"` // standard error of ln Rate; 0 if there is no interval

	// RatioErr is the part of StdErr that the capacities of a study do not share. It combines two errors: the standard
	// error of ln(Rate / best), and the RatioErr of best. Here best is the capacity that this one raced against.
	// RatioErr is 0 if there was no race. In a prediction of the simulator it is how far the simulator misses what the
	// study has measured.
	RatioErr float64 `json:"ratio_err,omitempty"`

	// Pieces say how much each block of requests moved the estimate. Compare needs them if two capacities were measured
	// with the same requests.
	Pieces []Piece `json:"pieces,omitempty"`

	// Doubt says what contradicts the answer, such as a pass above a fail; "" when nothing does.
	Doubt string `json:"doubt,omitempty"`

	// Limited says why the load generator, and not the server, decided the answer. The Bound is then AtLeast. Limited
	// is "" if the server decided.
	Limited string `json:"client_limited,omitempty"`

	Steps []Step `json:"steps,omitempty"` // all probes, in their order
}

// Known reports whether Rate is the capacity itself, and not a bound of it.
func (c Capacity) Known() bool { return c.Bound == Exact || c.Bound == Estimated }

// Met reports whether any rate kept the SLO.
func (c Capacity) Met() bool { return c.Bound == Exact || c.Bound == AtLeast }

// Carried is the rate by which capacities are ranked. For a lower bound it is the highest rate that passed with the
// load generator in time. It is 0 if no rate passed.
func (c Capacity) Carried() float64 {
	switch c.Bound {
	case Exact:
		return c.Rate
	case AtLeast:
		return c.Low
	}
	return 0
}

// PassedLate reports whether Rate passed only while the load generator was late.
func (c Capacity) PassedLate() bool { return c.Limited != "" && c.Low < c.Rate }

// RateText writes the rate with a unit, and with the 95 % interval if there is one: "2.71 req/s, 95 %: 2.52 to 2.91". A
// bound begins with "at least". The parameter figure writes a rate without its unit.
func (c Capacity) RateText(unit string, figure func(float64) string) string {
	rate := figure(c.Rate) + " " + unit
	interval := fmt.Sprintf(", 95 %%: %s to %s", figure(c.Lowest), figure(c.Highest))
	switch {
	case c.PassedLate():
		return "at least about " + rate
	case c.Bound == AtLeast:
		return "at least " + rate
	case c.Bound == Estimated:
		return "about " + rate + interval
	case c.StdErr > 0:
		return rate + interval
	}
	return rate
}

// Times returns the capacity with all its rates multiplied by a factor. The rates of the Steps do not change.
func (c Capacity) Times(factor float64) Capacity {
	c.Rate *= factor
	c.Low *= factor
	c.High *= factor
	c.Lowest *= factor
	c.Highest *= factor
	c.InFlight *= factor
	return c
}
