package capacity

import "math"

// A Comparison says how much higher one capacity is than another, and how sure that is.
type Comparison struct {
	Ratio   float64 `json:"ratio"`    // of the two rates
	Lowest  float64 `json:"lowest"`   // 95 % interval of the ratio
	Highest float64 `json:"highest"`  // likewise
	Better  float64 `json:"p_better"` // probability that the first is the higher one
}

// Distinguishable reports whether the first is higher beyond reasonable doubt: in 2.5 of 100 such comparisons of equals it
// would seem so too, the upper half of what a 95 % interval leaves out.
func (c Comparison) Distinguishable() bool { return c.Better >= 0.975 }

// Compare holds capacity a against b. Their errors are taken to be independent and normal in ln rate, which is careful where both
// met the same draws: what these have too many bursts of moves both the same way.
//
// ok is false where one of the two is a bound, or of unknown error: how sure the difference is then cannot be told.
func Compare(a, b Capacity) (c Comparison, ok bool) {
	if a.Bound != Exact || b.Bound != Exact || !(a.StdErr > 0 && b.StdErr > 0) {
		return c, false
	}
	ratio, stdErr := math.Log(a.Rate/b.Rate), math.Hypot(a.StdErr, b.StdErr)
	return Comparison{
		Ratio:   math.Exp(ratio),
		Lowest:  math.Exp(ratio - deviations*stdErr),
		Highest: math.Exp(ratio + deviations*stdErr),
		Better:  normal(ratio / stdErr),
	}, true
}
