package capacity

import "math"

// Luck is the expected error, in ln rate, of a capacity that was chosen because it is higher than others. The highest of
// equal capacities is the one whose error was luckiest.
//
// Luck takes the measured rates as the true ones, and asks what the choice would add to the chosen rate if all were
// measured once more. That is an estimate by the parametric bootstrap (Efron and Tibshirani 1993, chapter 10), computed
// as an integral instead of by random draws. It is 0 if the others are far below.
func (c Capacity) Luck(others []Capacity) float64 {
	means, errs := []float64{0}, []float64{0} // ln rate relative to the chosen one, and the standard error that no other capacity shares
	for _, other := range others {
		lead, ok := Compare(c, other)
		if !ok {
			continue
		}
		half := lead.stdErr / math.Sqrt2 // this is the error of the difference; each of the two has half of its variance
		means, errs = append(means, -math.Log(lead.Ratio)), append(errs, half)
		errs[0] = max(errs[0], half)
	}
	if len(means) == 1 {
		return 0
	}
	const steps, reach = 400, 6 // the integral covers ±reach standard errors
	width, luck := 0.0, 0.0
	for _, stdErr := range errs {
		width = max(width, stdErr)
	}
	step := 2 * reach * width / steps
	for k := range steps {
		top := step * (float64(k) + 0.5 - steps/2)
		for i := range means {
			luck += (top - means[i]) * step * isTop(top, i, means, errs)
		}
	}
	return max(0, luck)
}

// isTop returns the probability density that capacity i is the highest of all, and has the value top.
func isTop(top float64, i int, means, errs []float64) float64 {
	p := density((top-means[i])/errs[i]) / errs[i]
	for j := range means {
		if j != i {
			p *= normal((top - means[j]) / errs[j])
		}
	}
	return p
}

// Lowered returns the capacity with its rate and its interval lowered by luck, in ln rate. A capacity without a standard
// error is not changed.
func (c Capacity) Lowered(luck float64) Capacity {
	if c.Bound == Exact && c.StdErr > 0 {
		c.Rate *= math.Exp(-luck)
		c.Lowest, c.Highest = min(c.Lowest, c.Rate*math.Exp(-deviations*c.StdErr)), c.Rate*math.Exp(deviations*c.StdErr)
	}
	return c
}
