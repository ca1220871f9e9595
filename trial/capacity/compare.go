package capacity

import "math"

// A Comparison says how much higher one capacity is than another, and how certain that is.
type Comparison struct {
	Ratio   float64 `json:"ratio"`    // rate of the first, divided by the rate of the second
	Lowest  float64 `json:"lowest"`   // lower end of the ratio's 95 % interval
	Highest float64 `json:"highest"`  // upper end of this interval
	Better  float64 `json:"p_better"` // probability that the first capacity is higher

	stdErr float64 // standard error of ln Ratio
}

// Distinguishable reports whether the first capacity is higher with a probability of at least 97.5 %. For equal
// capacities this happens by chance in 2.5 of 100 comparisons.
func (c Comparison) Distinguishable() bool { return c.Better >= 0.975 }

// The rule that ends the rounds of measurements of two capacities. It is fixed before the first round, so that nobody goes
// on until chance gives a gain. TestTheRuleOfTheRounds in package tuner simulates it with normal errors of 2 % in each
// capacity: equal servers are then called different in 4.2 of 100 studies, and a gain of 5 % is found in 93.
const (
	MaxRounds = 6     // largest number of measurements of each
	clear     = 0.985 // probability that the first carries more, at or above which no round follows
	doubtful  = 0.3   // probability below which no round follows
)

// Open reports whether another round of measurements may show that the first capacity is higher by at least minGain (a
// fraction of the second).
func (c Comparison) Open(minGain float64) bool {
	return c.Better < clear && c.Better >= doubtful && c.Highest >= 1+minGain
}

// Compare compares capacity a with b. It assumes that the errors of ln rate have a normal distribution. If a and b were
// measured with the same requests, a burst among these requests moves both capacities the same way. The ratio of the
// two then has a smaller error, and their pieces show how much smaller.
//
// If a or b is only a bound, or has no standard error, ok is false.
func Compare(a, b Capacity) (c Comparison, ok bool) {
	if !a.Known() || !b.Known() || !(a.StdErr > 0 && b.StdErr > 0) {
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

// Among corrects a comparison for a choice: n capacities were compared with the second one, and the best of them is the
// first. The luckiest of n equal capacities looks better than it is. After the correction, Better exceeds 0.975 by
// chance in at most 2.5 of 100 choices. Lowest is too high in at most 2.5 of 100 choices. This holds for any number of
// truly better capacities among the n (Šidák's inequality).
func (c Comparison) Among(n int) Comparison {
	c.Better = math.Pow(c.Better, float64(n))
	c.Lowest = c.Ratio * math.Exp(-deviationsAmong(n)*c.stdErr)
	return c
}

// Among corrects a capacity that was chosen as the highest of n. It lowers the lower end of the interval, because the
// luckiest of n looks higher than it is.
func (c Capacity) Among(n int) Capacity {
	if c.Bound == Exact && c.StdErr > 0 {
		c.Lowest = min(c.Lowest, c.Rate*math.Exp(-deviationsAmong(n)*c.StdErr))
	}
	return c
}

// deviationsAmong returns a number of standard errors. In 97.5 of 100 choices, the error of the luckiest of n is
// smaller than that.
func deviationsAmong(n int) float64 {
	return math.Sqrt2 * math.Erfinv(2*math.Pow(0.975, 1/float64(max(1, n)))-1)
}

// maxCorrelation is the highest correlation of two errors that correlation returns. It is below 1 because the pieces do
// not contain the error of the estimate itself.
const maxCorrelation = 0.95

// correlation estimates how the errors of two capacities correlate, from 0 to maxCorrelation. It compares their pieces,
// which say how much the same requests moved each capacity. The estimate is more likely too low than too high: for some
// pairs of simulated servers, the interval of the ratio was one to three times as wide as the true error.
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
