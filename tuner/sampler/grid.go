package sampler

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

const (
	// maxLevels limits the number of levels of one numeric parameter.
	maxLevels = 64
	// maxCells limits the points of a grid before the constraints are applied, so that the grid is built within a
	// second.
	maxCells = 1 << 14
)

// A grid has all combinations of all choices and of evenly spaced levels of the numbers (a full factorial). The seed
// decides the order of the points.
type grid struct {
	points []space.Point
}

// newGrid chooses the levels so that the grid has as many legal points as the budget allows. All numeric parameters
// have about the same number of levels; those with a wider range get another level first. The grid always has all
// choices, and at least two levels of each number.
func newGrid(s *space.Space, seed uint64, budget int) (*grid, error) {
	parameters := s.Parameters()
	levels := make([][]string, len(parameters))
	var numbers []int
	for i := range parameters {
		levels[i] = parameters[i].Levels(2)
		if choices(&parameters[i]) == 0 {
			numbers = append(numbers, i)
		}
	}
	if n := cells(levels); n > maxCells {
		return nil, fmt.Errorf("lay out a grid: %s need at least %.0f points, more than %d; search fewer of them, or take tpe or random",
			render.Count(len(parameters), "parameter"), n, maxCells)
	}
	slices.SortStableFunc(numbers, func(a, b int) int { return byRange(&parameters[a], &parameters[b]) })
	best := factorial(s, levels)
	for grown := true; grown; {
		grown = false
		for _, i := range numbers {
			finer := slices.Clone(levels)
			finer[i] = parameters[i].Levels(len(levels[i]) + 1)
			if len(finer[i]) == len(levels[i]) || len(finer[i]) > maxLevels || cells(finer) > maxCells {
				continue
			}
			if larger := factorial(s, finer); len(larger) <= budget {
				levels, best, grown = finer, larger, true
			}
		}
	}
	if len(best) == 0 {
		return nil, errors.New("lay out a grid: none of its points keeps the constraints; widen the ranges, or take tpe or random")
	}
	stream(seed, "grid", 0).Shuffle(len(best), func(i, j int) { best[i], best[j] = best[j], best[i] })
	return &grid{best}, nil
}

// cells returns the number of combinations of the levels.
func cells(levels [][]string) float64 {
	n := 1.0
	for _, l := range levels {
		n *= float64(len(l))
	}
	return n
}

// byRange compares two parameters by the ratio of maximum and minimum, the largest ratio first. A range from 0 counts
// as the largest.
func byRange(a, b *space.Parameter) int {
	ratio := func(p *space.Parameter) float64 {
		if p.Min <= 0 {
			return math.Inf(1)
		}
		return p.Max / p.Min
	}
	return cmp.Compare(ratio(b), ratio(a))
}

// factorial returns the legal points among all combinations of the levels, without duplicates.
func factorial(s *space.Space, levels [][]string) []space.Point {
	var legal []space.Point
	known := map[string]bool{}
	for code := range int(cells(levels)) {
		p := space.Point{}
		for i, parameter := range s.Parameters() {
			p[parameter.Name] = levels[i][code%len(levels[i])]
			code /= len(levels[i])
		}
		u, _ := s.Unit(p)
		p = s.Sample(u) // Sample leaves out inactive parameters
		if name := p.String(); !known[name] && s.Check(p) == nil {
			known[name] = true
			legal = append(legal, p)
		}
	}
	return legal
}

// Next returns the first point of the grid that was not tried yet.
func (g *grid) Next(_ int, history []studies.Trial) (space.Point, error) {
	known := Tried(history)
	for _, p := range g.points {
		if !known[p.String()] {
			return p, nil
		}
	}
	return nil, fmt.Errorf("%w: the whole grid of %s was tried", ErrExhausted, render.Count(len(g.points), "point"))
}
