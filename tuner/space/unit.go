package space

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// significantDigits is the precision of a Float without a step, in decimal digits. No flag of vLLM needs more.
const significantDigits = 6

// Sample maps the unit cube to points. The list u has one number in [0, 1] for each parameter, in order. Each legal
// value of a parameter, including both ends, has an equally large part of [0, 1]. On a logarithmic scale, the parts are
// equal in the logarithm. Sample drops parameters whose condition does not hold. It ignores constraints; Check tests
// them. NaN counts as 0.5.
func (s *Space) Sample(u []float64) Point {
	p := make(Point, len(s.parameters))
	for i := range s.parameters {
		p[s.parameters[i].Name] = s.parameters[i].valueAt(u[i])
	}
	for _, i := range s.order {
		if !s.active(i, p) {
			delete(p, s.parameters[i].Name)
		}
	}
	return p
}

// Unit maps a point to the unit cube, so that Sample(u) is the point again. A value outside its range becomes the
// nearer end of the range. If the value of a parameter is absent or equals no choice, the parameter has 0.5 in u and
// false in active.
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

// Nearest returns the point with each value moved to the nearest legal value of its parameter. It leaves out values
// that equal no choice, and parameters whose condition does not hold.
func (s *Space) Nearest(p Point) Point {
	u, active := s.Unit(p)
	near := s.Sample(u)
	for i := range s.parameters {
		if !active[i] {
			delete(near, s.parameters[i].Name)
		}
	}
	return near
}

// Levels returns up to n different values for a grid. They include both ends of the range, and are evenly spaced on the
// scale of Sample. For a parameter with choices, it ignores n and returns all choices.
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
		return []string{p.valueAt(0.5)}
	}
	first, _ := p.unit(formatNumber(p.Min))
	last, _ := p.unit(formatNumber(p.Max))
	levels := make([]string, n)
	for i := range n {
		levels[i] = p.valueAt(first + (last-first)*float64(i)/float64(n-1))
	}
	return slices.Compact(levels)
}

// valueAt returns the value of the parameter that belongs to a number u in [0, 1].
func (p *Parameter) valueAt(u float64) string {
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
	// The limit between two values is their geometric mean.
	if k < n-1 && x > math.Sqrt(p.number(k)*p.number(k+1)) {
		k++
	}
	return p.text(k)
}

// unit is the inverse of the method valueAt. It returns the middle of the part of [0, 1] that belongs to the value. If
// the value has no such part, the second result is false.
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

// choices returns the list of legal values; nil for Float and Int.
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

// logEnds returns the logarithms that belong to the ends 0 and 1 of the unit interval, for n >= 2 legal values. On the
// logarithmic scale, the parts of the first and the last value extend as far outwards as inwards. So these values are
// about as likely as their neighbours.
func (p *Parameter) logEnds(n float64) (low, high float64) {
	first, second := p.number(0), p.number(1)
	last, beforeLast := p.number(n-1), p.number(n-2)
	return math.Log(first) - math.Log(second/first)/2, math.Log(last) + math.Log(last/beforeLast)/2
}

// text returns the k-th legal value as a text for vLLM. It rounds the value to the decimals of the range's start or of
// the step, whichever has more decimals. So 0.8 + 13 * 0.01 is exactly 0.93.
func (p *Parameter) text(k float64) string {
	return formatNumber(rounded(p.number(k), 'f', max(decimals(p.Min), decimals(p.step()))))
}

// continuousText returns the value that belongs to u, for a Float without a step.
func (p *Parameter) continuousText(u float64) string {
	v := p.Min + u*(p.Max-p.Min)
	if p.Log {
		v = p.Min * math.Pow(p.Max/p.Min, u)
	}
	return formatNumber(max(p.Min, min(p.Max, rounded(v, 'g', significantDigits))))
}

// rounded rounds a number to the precision of a format of strconv.
func rounded(v float64, format byte, precision int) float64 {
	r, _ := strconv.ParseFloat(strconv.FormatFloat(v, format, precision, 64), 64)
	return r
}

func formatNumber(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// decimals returns the number of decimal places of v.
func decimals(v float64) int {
	_, places, _ := strings.Cut(formatNumber(v), ".")
	return len(places)
}
