package capacity

import "math"

// A Comparison says how much higher one capacity is than another, and how sure that is.
type Comparison struct {
	Ratio   float64 `json:"ratio"`    // of the two rates
	Lowest  float64 `json:"lowest"`   // 95 % interval of the ratio
	Highest float64 `json:"highest"`  // likewise
	Better  float64 `json:"p_better"` // probability that the first is the higher one

	stdErr float64 // of ln Ratio
}

// Distinguishable reports whether the first is higher beyond reasonable doubt: in 2.5 of 100 such comparisons of equals it
// would seem so too, the upper half of what a 95 % interval leaves out.
func (c Comparison) Distinguishable() bool { return c.Better >= 0.975 }

// Compare holds capacity a against b. Their errors are taken to be normal in ln rate. Where both met the same requests, what these
// have too many bursts of moves both the same way, and their ratio is surer than each: by how much is read off their pieces.
//
// ok is false where one of the two is a bound, or of unknown error: how sure the difference is then cannot be told.
func Compare(a, b Capacity) (c Comparison, ok bool) {
	if a.Bound != Exact || b.Bound != Exact || !(a.StdErr > 0 && b.StdErr > 0) {
		return c, false
	}
	ratio := math.Log(a.Rate / b.Rate)
	stdErr := math.Sqrt(a.StdErr*a.StdErr + b.StdErr*b.StdErr - 2*correlation(a, b)*a.StdErr*b.StdErr)
	return Comparison{
		Ratio:   math.Exp(ratio),
		Lowest:  math.Exp(ratio - deviations*stdErr),
		Highest: math.Exp(ratio + deviations*stdErr),
		Better:  normal(ratio / stdErr),
		stdErr:  stdErr,
	}, true
}

// Among is the comparison where the first was chosen as the best of n that were all compared with the second. The luckiest of n equals
// looks better than it is: with n of them Better is above 0.975 in no more than 2.5 of 100 choices, and Lowest is too high in no more.
// That holds however few of the n are any good (Šidák's inequality).
func (c Comparison) Among(n int) Comparison {
	c.Better = math.Pow(c.Better, float64(n))
	c.Lowest = c.Ratio * math.Exp(-deviationsAmong(n)*c.stdErr)
	return c
}

// Among is the capacity where it was chosen as the highest of n: the lower end of its interval is that of all n together.
func (c Capacity) Among(n int) Capacity {
	if c.Bound == Exact && c.StdErr > 0 {
		c.Lowest = min(c.Lowest, c.Rate*math.Exp(-deviationsAmong(n)*c.StdErr))
	}
	return c
}

// deviationsAmong is how many standard errors the luckiest of n is off by, at most, in 97.5 of 100 choices.
func deviationsAmong(n int) float64 {
	return math.Sqrt2 * math.Erfinv(2*math.Pow(0.975, 1/float64(max(1, n)))-1)
}

// mostTogether bounds how much of what two capacities are off by is taken to be the same: an error of the estimate itself is not in
// their pieces.
const mostTogether = 0.95

// correlation is that of the errors of two capacities, 0 to mostTogether, told by how the same requests have moved either.
// Over some pairs of simulated servers it made the interval of the ratio between one and three times as wide as its error.
func correlation(a, b Capacity) float64 {
	moved := make(map[Piece]float64)
	var ab, aa, bb float64
	for _, p := range a.Pieces {
		aa += p.Moved * p.Moved
		moved[Piece{Draw: p.Draw, Block: p.Block}] += p.Moved
	}
	for _, p := range b.Pieces {
		bb += p.Moved * p.Moved
		ab += p.Moved * moved[Piece{Draw: p.Draw, Block: p.Block}]
	}
	if !(aa > 0 && bb > 0) {
		return 0
	}
	return max(0, min(mostTogether, ab/math.Sqrt(aa*bb)))
}
