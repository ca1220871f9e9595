package space

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// significantDigits is the precision of a Float without a step. No flag of vLLM needs more.
const significantDigits = 6

// Sample maps the unit cube to a point: one u in [0, 1] for each parameter, in order. Every legal value of a parameter,
// both ends included, has an equal part of [0, 1]; on a logarithmic scale parts are equal in the logarithm.
// Sample drops parameters whose condition does not hold. It does not look at constraints; Check does. NaN counts as 0.5.
func (s *Space) Sample(u []float64) Point {
	p := make(Point, len(s.parameters))
	for i := range s.parameters {
		p[s.parameters[i].Name] = s.parameters[i].at(u[i])
	}
	for _, i := range s.order {
		if !s.active(i, p) {
			delete(p, s.parameters[i].Name)
		}
	}
	return p
}

// Unit maps a point to the unit cube; Sample returns the same point again. A value outside its range goes to the nearer
// end. If the point has no value for a parameter, or one that equals no choice, active is false and u is 0.5.
func (s *Space) Unit(p Point) (u []float64, active []bool) {
	u, active = make([]float64, len(s.parameters)), make([]bool, len(s.parameters))
	for i := range s.parameters {
		u[i] = 0.5
		if text, ok := p[s.parameters[i].Name]; ok {
			if at, ok := s.parameters[i].unit(text); ok {
				u[i], active[i] = at, true
			}
		}
	}
	return u, active
}

// Levels returns up to n different values for a grid, with both ends and evenly spread on Sample's scale. It returns all
// choices, whatever n is.
func (p *Parameter) Levels(n int) []string {
	if choices := p.choices(); choices != nil {
		return slices.Clone(choices)
	}
	n = max(n, 1)
	if count := p.count(); count > 0 && count <= float64(n) {
		all := make([]string, int(count))
		for k := range all {
			all[k] = p.text(float64(k))
		}
		return all
	}
	if n == 1 {
		return []string{p.at(0.5)}
	}
	first, _ := p.unit(formatNumber(p.Min))
	last, _ := p.unit(formatNumber(p.Max))
	levels := make([]string, n)
	for i := range n {
		levels[i] = p.at(first + (last-first)*float64(i)/float64(n-1))
	}
	return slices.Compact(levels)
}

// at returns the value at u.
func (p *Parameter) at(u float64) string {
	if math.IsNaN(u) {
		u = 0.5
	}
	u = max(0, min(1, u))
	if choices := p.choices(); choices != nil {
		return choices[min(len(choices)-1, int(u*float64(len(choices))))]
	}
	n := p.count()
	switch {
	case n == 0:
		return p.continuousText(u)
	case !p.Log || n == 1:
		return p.text(min(n-1, math.Floor(u*n)))
	}
	low, high := p.logEnds(n)
	x := math.Exp(low + u*(high-low))
	k := max(0, min(n-1, math.Floor((x-p.Min)/p.step())))
	// Values meet at their geometric mean.
	if k < n-1 && x > math.Sqrt(p.number(k)*p.number(k+1)) {
		k++
	}
	return p.text(k)
}

// unit is the inverse of at. It returns the middle of the value's part of [0, 1], and whether the value has one.
func (p *Parameter) unit(text string) (float64, bool) {
	if choices := p.choices(); choices != nil {
		i := slices.Index(choices, p.canonical(text))
		return (float64(i) + 0.5) / float64(len(choices)), i >= 0
	}
	v, err := p.Number(text)
	if err != nil {
		return 0, false
	}
	v = max(p.Min, min(p.Max, v))
	n := p.count()
	if n == 1 || p.Max <= p.Min {
		return 0.5, true
	}
	if n == 0 {
		if p.Log {
			return math.Log(v/p.Min) / math.Log(p.Max/p.Min), true
		}
		return (v - p.Min) / (p.Max - p.Min), true
	}
	k := max(0, min(n-1, math.Round((v-p.Min)/p.step())))
	if !p.Log {
		return (k + 0.5) / n, true
	}
	low, high := p.logEnds(n)
	return (math.Log(p.number(k)) - low) / (high - low), true
}

// choices returns the legal values, or nil for Float and Int.
func (p *Parameter) choices() []string {
	switch p.Kind {
	case Float, Int:
		return nil
	case Bool:
		return []string{"false", "true"}
	}
	return p.Choices
}

// step returns the distance between legal values. 0 means that any value is legal.
func (p *Parameter) step() float64 {
	if p.Kind == Int && p.Step == 0 {
		return 1
	}
	return p.Step
}

// count returns how many legal values a Float or Int has. 0 means that any value is legal.
func (p *Parameter) count() float64 {
	step := p.step()
	if step == 0 {
		return 0
	}
	return math.Floor((p.Max-p.Min)/step+stepTolerance) + 1
}

// number returns the k-th legal value.
func (p *Parameter) number(k float64) float64 { return p.Min + k*p.step() }

// logEnds returns the logarithms between which n >= 2 values lie. The first and the last value reach as far outwards as
// inwards, so that they are as likely as their neighbours.
func (p *Parameter) logEnds(n float64) (low, high float64) {
	first, second := p.number(0), p.number(1)
	last, beforeLast := p.number(n-1), p.number(n-2)
	return math.Log(first) - math.Log(second/first)/2, math.Log(last) + math.Log(last/beforeLast)/2
}

// text returns the k-th legal value as vLLM reads it. It has no more decimals than the range and the step have, so that
// 0.8 + 13 * 0.01 is 0.93.
func (p *Parameter) text(k float64) string {
	return formatNumber(rounded(p.number(k), 'f', max(decimals(p.Min), decimals(p.step()))))
}

// continuousText returns the value of a Float without a step at u.
func (p *Parameter) continuousText(u float64) string {
	v := p.Min + u*(p.Max-p.Min)
	if p.Log {
		v = p.Min * math.Pow(p.Max/p.Min, u)
	}
	return formatNumber(max(p.Min, min(p.Max, rounded(v, 'g', significantDigits))))
}

// rounded returns a number as it is read from its text in a format of strconv.
func rounded(v float64, format byte, precision int) float64 {
	r, _ := strconv.ParseFloat(strconv.FormatFloat(v, format, precision, 64), 64)
	return r
}

func formatNumber(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// decimals returns how many decimal places a number has.
func decimals(v float64) int {
	_, places, _ := strings.Cut(formatNumber(v), ".")
	return len(places)
}
