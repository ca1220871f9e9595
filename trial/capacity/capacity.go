// Package capacity finds the highest request rate that keeps the SLO, given a probe. It has no clock and does no I/O.
package capacity

import (
	"context"
	"errors"
)

// A Bound says what kind of number a capacity is.
type Bound string

// The bounds.
const (
	Exact   Bound = "exact"    // bracketed by a pass and a fail
	AtLeast Bound = "at least" // passed at the highest rate that was offered, or that the load generator could offer
	AtMost  Bound = "at most"  // failed at the lowest rate that was offered
)

// An Outcome is what one probe at one rate says.
type Outcome struct {
	Pass     bool
	Headroom float64 // ln(limit/value) of the binding limit; negative when it is broken
	Binding  string  // name of the binding limit
	InFlight float64 // mean requests in flight

	// Limited says that the load generator, not the server, may have decided; "" when it did not. Such an outcome is no boundary.
	Limited string
}

// ErrLimited is returned by Find when the load generator could not offer even the lowest rate as planned.
var ErrLimited = errors.New("the load generator is the limit, not the server")

// A Probe measures one rate in requests per second. Its error ends the search.
type Probe func(ctx context.Context, rate float64) (Outcome, error)

// A Capacity is the answer of a search.
type Capacity struct {
	Rate     float64 `json:"rate"` // requests per second; for AtMost the lowest failed rate, which is no capacity
	Low      float64 `json:"low"`  // highest rate that passed; 0 when none did
	High     float64 `json:"high"` // lowest rate that failed; 0 when none did
	Bound    Bound   `json:"bound"`
	Binding  string  `json:"binding"`   // limit that binds at the boundary
	InFlight float64 `json:"in_flight"` // requests in flight at Rate, between those of the neighbouring probes
	Probes   int     `json:"probes"`
	Why      string  `json:"why"` // why the search stopped
}

// Met reports whether any rate kept the SLO.
func (c Capacity) Met() bool { return c.Bound == Exact || c.Bound == AtLeast }
