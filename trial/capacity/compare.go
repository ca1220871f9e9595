package capacity

import "math"

// A Comparison says how much higher one capacity is than another, and how sure that is.
type Comparison struct {
	Ratio   float64 `json:"ratio"`    // of the two rates
	Lowest  float64 `json:"lowest"`   // lower end of the ratio's 95 % interval
	Highest float64 `json:"highest"`  // upper end
	Better  float64 `json:"p_better"` // probability that the first is the higher one

	stdErr float64 // of ln Ratio
}

// Distinguishable reports whether the first is higher beyond reasonable doubt. Of 100 comparisons of equal capacities
// 2.5 seem so by chance: a 95 % interval leaves out 2.5 % above.
func (c Comparison) Distinguishable() bool { return c.Better >= 0.975 }

// Compare compares capacity a with b. It assumes errors that are normal in ln rate. A burst among requests that both were
// measured with moves both capacities the same way, so their ratio has a smaller error than either capacity. The pieces
// of both capacities show by how much.
//
// ok is false if a or b is a bound, or has no standard error.
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

// Among corrects a comparison whose first capacity was chosen as the best of n that were all compared with the second.
// The luckiest of n equals looks better than it is. After the correction Better is above 0.975, and Lowest too high, in
// at most 2.5 of 100 choices. That holds however few of the n are any good (Šidák's inequality).
func (c Comparison) Among(n int) Comparison {
	c.Better = math.Pow(c.Better, float64(n))
	c.Lowest = c.Ratio * math.Exp(-deviationsAmong(n)*c.stdErr)
	return c
}

// Among corrects a capacity that was chosen as the highest of n: the lower end of its interval must hold for all n
// together.
func (c Capacity) Among(n int) Capacity {
	if c.Bound == Exact && c.StdErr > 0 {
		c.Lowest = min(c.Lowest, c.Rate*math.Exp(-deviationsAmong(n)*c.StdErr))
	}
	return c
}

// deviationsAmong returns how many standard errors bound the error of the luckiest of n in 97.5 of 100 choices.
func deviationsAmong(n int) float64 {
	return math.Sqrt2 * math.Erfinv(2*math.Pow(0.975, 1/float64(max(1, n)))-1)
}

// maxCorrelation bounds the correlation of two errors. It is below 1 because the pieces do not contain the error of the
// estimate itself.
const maxCorrelation = 0.95

// correlation estimates the correlation of the errors of two capacities, 0 to maxCorrelation, from their pieces: how far
// the same requests have moved each capacity. For some pairs of simulated servers the interval of the ratio was between
// one and three times as wide as its error.
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
	return max(0, min(maxCorrelation, ab/math.Sqrt(aa*bb)))
}
