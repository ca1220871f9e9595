package insight

import (
	"maps"
	"math"
	"math/rand/v2"
	"slices"

	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

const (
	maxFlatLoss = 0.02 // a smaller loss of capacity counts as no loss
	minSure     = 0.8  // smallest probability of no loss that each value of a flat region must have
	levels      = 41   // number of values of a numeric flag that are examined; two neighbours in [16, 1024] differ by 11 %
	perProcess  = 5    // functions for each Gaussian process; a probability of no loss is a share of draws × perProcess functions
)

// flat returns which values each flag may have without a loss, if all other flags have their values from the best
// trial. It returns nil if the point of the best trial is not fully known.
func flat(s *space.Space, m *sampler.Model, best studies.Trial, rng *rand.Rand) *report.Flat {
	at, whole := sampler.Complete(s, best)
	if !whole {
		return nil
	}
	at = s.Nearest(at)
	points := []space.Point{at}
	sides := make([][]side, len(s.Parameters()))
	for i := range sides {
		sides[i] = sidesOf(s, i, at)
		for j := range sides[i] {
			sides[i][j].first = len(points)
			points = append(points, sides[i][j].points...)
		}
	}
	noLoss := noLosses(m, points, rng)
	f := &report.Flat{Within: maxFlatLoss, Sure: minSure, Flags: []report.FlatFlag{}}
	for i, of := range sides {
		if flag, ok := flatFlag(s, i, at, of, noLoss); ok {
			f.Flags = append(f.Flags, flag)
		}
	}
	return f
}

// A side has the legal values of one flag below or above its best value. The value nearest to the best value comes
// first. If the values of a flag have no order, each value is a side of its own.
type side struct {
	values []string
	points []space.Point // for each value, the best point with that value
	first  int           // index of the first point in the list of all points
	ends   bool          // the last value is the last one of the flag; no value on this side is illegal
}

// sidesOf returns the sides of flag i.
func sidesOf(s *space.Space, i int, at space.Point) (sides []side) {
	p := &s.Parameters()[i]
	best, active := at[p.Name]
	all := p.Levels(levels)
	switch {
	case !active || len(all) < 2:
		return nil
	case isNumber(p):
		value := func(text string) float64 { v, _ := p.Number(text); return v }
		var low, high []string
		for _, text := range all {
			switch {
			case value(text) < value(best):
				low = append(low, text)
			case value(text) > value(best):
				high = append(high, text)
			}
		}
		slices.Reverse(low)
		return []side{sideOf(s, p.Name, at, low), sideOf(s, p.Name, at, high)}
	}
	for _, text := range all {
		if text != best {
			sides = append(sides, sideOf(s, p.Name, at, []string{text}))
		}
	}
	return sides
}

// sideOf returns the values on one side of the best one, the nearest first. The side ends before the first value that is not legal together with the other values of the
// best point.
func sideOf(s *space.Space, name string, at space.Point, values []string) side {
	of := side{ends: true}
	for _, text := range values {
		p, ok := withValue(s, at, name, text)
		if !ok {
			of.ends = false
			break
		}
		of.values, of.points = append(of.values, text), append(of.points, p)
	}
	return of
}

// withValue returns the point with another value of one flag. If the new point is not legal, ok is false. If the value
// makes a flag active that the old point does not have, ok is false too.
func withValue(s *space.Space, at space.Point, name, text string) (p space.Point, ok bool) {
	p = maps.Clone(at)
	p[name] = text
	u, _ := s.Unit(p)
	sampled := s.Sample(u)
	for flag := range sampled {
		if _, had := at[flag]; !had {
			return nil, false
		}
	}
	maps.DeleteFunc(p, func(flag, _ string) bool { _, active := sampled[flag]; return !active })
	return p, s.Check(p) == nil
}

// noLosses returns a probability for each point: the server runs with the point, and its capacity is at most
// maxFlatLoss below the capacity of the first point.
func noLosses(m *sampler.Model, points []space.Point, rng *rand.Rand) []float64 {
	all := m.Draw(draws*perProcess, points, rng)
	likely := m.Runs(points)
	probabilities := make([]float64, len(points))
	for j := range points {
		for _, values := range all {
			if values[j]-values[0] >= math.Log(1-maxFlatLoss) {
				probabilities[j] += likely[j] / float64(len(all))
			}
		}
	}
	return probabilities
}

// flatFlag returns the flat region of flag i. If the region has no value besides the best one, ok is false.
func flatFlag(s *space.Space, i int, at space.Point, sides []side, noLoss []float64) (f report.FlatFlag, ok bool) {
	p := &s.Parameters()[i]
	f = report.FlatFlag{Flag: p.Name, Best: at[p.Name]}
	ends := []string{f.Best, f.Best}
	all, others := true, 0
	for j, of := range sides {
		n := 0
		for n < len(of.values) && noLoss[of.first+n] >= minSure {
			n++
		}
		all = all && of.ends && n == len(of.values)
		others += n
		if n > 0 && !isNumber(p) {
			f.Values = append(f.Values, of.values[n-1])
		} else if n > 0 {
			ends[j] = of.values[n-1]
		}
	}
	if isNumber(p) {
		f.Lowest, f.Highest = ends[0], ends[1]
		f.Part = min(0.99, partBetween(s, i, ends[0], ends[1]))
	} else {
		f.Values = append([]string{f.Best}, f.Values...)
		f.Part = float64(len(f.Values)) / float64(1+len(sides))
	}
	if all { // on the search's scale, the distance between the ends of the range is a little less than 1
		f.Part = 1
	}
	return f, others > 0
}

func isNumber(p *space.Parameter) bool { return p.Kind == space.Float || p.Kind == space.Int }

// partBetween returns the distance between two values of flag i on the search's scale. The distance is a fraction of
// the flag's range.
func partBetween(s *space.Space, i int, low, high string) float64 {
	name := s.Parameters()[i].Name
	from, _ := s.Unit(space.Point{name: low})
	to, _ := s.Unit(space.Point{name: high})
	return to[i] - from[i]
}
