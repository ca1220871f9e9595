package capacity

import (
	"cmp"
	"math"
	"slices"
)

// Pooled returns the capacity of a server that was measured several times, each time with other requests. The list all
// has every measurement, c too. The result is the mean of ln rate, weighted by 1/StdErr². If the capacities differ by
// more than their errors, the error of the mean grows as well (Birge's ratio, 1932). So a difference between two starts
// of a server widens the interval.
//
// The error of the model is the same in all measurements, so it stays in the interval. It is not in StdErr, because two
// servers that are compared have it in common.
//
// The bracket, the probes and the steps stay as in c. ok is false if one of the capacities is only a bound or has no
// standard error; pooled is then c itself.
func (c Capacity) Pooled(all []Capacity) (pooled Capacity, ok bool) {
	var weights, mean, scatter float64
	for _, one := range all {
		if one.Bound != Exact || !(one.StdErr > 0) {
			return c, false
		}
		weights += one.weight()
		mean += one.weight() * math.Log(one.Rate)
	}
	mean /= weights
	pooled = c
	pooled.InFlight, pooled.Pieces, pooled.RatioErr = 0, nil, 0
	var ofModel []float64
	for _, one := range all {
		ofModel = append(ofModel, one.ofModel())
		share := one.weight() / weights
		off := math.Log(one.Rate) - mean
		scatter += one.weight() * off * off
		pooled.InFlight += share * one.InFlight
		pooled.Doubt = cmp.Or(pooled.Doubt, one.Doubt)
		for _, p := range one.Pieces {
			p.Moved *= share
			pooled.Pieces = append(pooled.Pieces, p)
		}
	}
	pooled.Rate, pooled.StdErr = math.Exp(mean), math.Sqrt(1/weights)
	half := deviations * pooled.StdErr
	if n := len(all) - 1; n > 0 {
		pooled.StdErr *= max(1, math.Sqrt(scatter/float64(n)))
		half = deviations * math.Hypot(pooled.StdErr, slices.Min(ofModel))
	}
	pooled.Lowest, pooled.Highest = pooled.Rate*math.Exp(-half), pooled.Rate*math.Exp(half)
	return pooled, true
}

// weight is the weight of a capacity in a mean of ln rate.
func (c Capacity) weight() float64 { return 1 / (c.StdErr * c.StdErr) }

// ofModel is the part of StdErr that all measurements of one server have in common.
func (c Capacity) ofModel() float64 { return min(modelError, c.StdErr/2) }
