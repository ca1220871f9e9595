package capacity

import "math"

// Luck is the expected error, in ln rate, of a capacity that was chosen because it is higher than others. The highest of
// equal capacities is the one whose error was luckiest.
//
// Luck takes likely leads over the others as the true ones, and asks how much too high this capacity would be if all were
// measured once more and it was the highest again. That is an estimate by the parametric bootstrap (Efron and Tibshirani
// 1993, chapter 10), computed as an integral instead of by random draws. It is near 0 if the others are far below, or if
// this capacity is known far better than the others.
func (c Capacity) Luck(others []Capacity) float64 {
	own, leads := c.leadsOver(others)
	if !(own > 0) {
		return 0
	}
	const steps, reach = 400, 6 // the integral covers ±reach standard errors
	step := 2 * reach * own / steps
	highest, off := 0.0, 0.0
	for k := range steps {
		x := step * (float64(k) + 0.5 - steps/2) // error of this capacity
		p := density(x / own)
		for _, l := range leads {
			p *= normal((x + l.mean) / max(l.stdErr, own/100))
		}
		highest += p
		off += x * p
	}
	if !(highest > 0) {
		return 0
	}
	return max(0, off/highest)
}

// priorLead is the standard deviation of ln capacity between the best points of a study. Leads that are small beside their
// error are mostly luck, so they are shrunk as if this was known before (empirical Bayes).
const priorLead = 0.05

// A lead says how far a capacity is above another one, in ln rate, and with which standard error if this capacity had no
// error.
type lead struct{ mean, stdErr float64 }

// leadsOver returns the leads over the other capacities. The result own is the standard error of this capacity that its
// nearest rival, the one with the least sure lead, does not share; 0 if there is no rival.
func (c Capacity) leadsOver(others []Capacity) (own float64, leads []lead) {
	nearest := math.Inf(1)
	for _, other := range others {
		l, ok := Compare(c, other)
		if !ok {
			continue
		}
		variance := l.stdErr * l.stdErr
		leads = append(leads, lead{math.Log(l.Ratio) * priorLead * priorLead / (priorLead*priorLead + variance), l.stdErr})
		if sure := math.Log(l.Ratio) / l.stdErr; sure < nearest {
			nearest = sure
			own = math.Sqrt(max(0, min(variance, c.StdErr*c.StdErr-correlation(c, other)*c.StdErr*other.StdErr)))
		}
	}
	for i, l := range leads {
		leads[i].stdErr = math.Sqrt(max(0, l.stdErr*l.stdErr-own*own))
	}
	return own, leads
}

// Lowered returns the capacity with its rate and its interval lowered by luck, in ln rate. A capacity without a standard
// error is not changed.
func (c Capacity) Lowered(luck float64) Capacity {
	if luck > 0 && c.Bound == Exact && c.StdErr > 0 {
		c.Rate *= math.Exp(-luck)
		c.Lowest, c.Highest = min(c.Lowest, c.Rate*math.Exp(-deviations*c.StdErr)), c.Highest*math.Exp(-luck)
	}
	return c
}
