package sampler

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

const (
	// maxLevels bounds the number of levels of a continuous parameter.
	maxLevels = 64
	// maxCells bounds a factorial before its constraints apply, so that it is built within a second.
	maxCells = 1 << 14
)

// A grid is the full factorial over all choices and over evenly spaced levels of the numbers, in a seeded order.
type grid struct {
	points []space.Point
}

// newGrid chooses the levels so that the grid has as many legal points as fit the budget. All numbers have nearly the
// same number of levels; numbers with a wider range come first. The grid always has all choices, and at least two
// levels of each number.
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
		return nil, fmt.Errorf("lay out a grid: %d parameters make at least %.0f points, more than %d; search fewer of them, or take tpe or random",
			len(parameters), n, maxCells)
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

// cells returns the size of a factorial.
func cells(levels [][]string) float64 {
	n := 1.0
	for _, l := range levels {
		n *= float64(len(l))
	}
	return n
}

// byRange orders by the ratio of the ends of the ranges, the largest first. A range from 0 counts as the largest.
func byRange(a, b *space.Parameter) int {
	ratio := func(p *space.Parameter) float64 {
		if p.Min <= 0 {
			return math.Inf(1)
		}
		return p.Max / p.Min
	}
	return cmp.Compare(ratio(b), ratio(a))
}

// factorial returns the legal points of a factorial, each once.
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
		p = s.Sample(u) // the sample leaves out inactive parameters
		if name := p.String(); !known[name] && s.Check(p) == nil {
			known[name] = true
			legal = append(legal, p)
		}
	}
	return legal
}

// Next returns the first untried point of the grid.
func (g *grid) Next(_ int, history []studies.Trial) (space.Point, error) {
	known := tried(history)
	for _, p := range g.points {
		if !known[p.String()] {
			return p, nil
		}
	}
	return nil, fmt.Errorf("%w: all %d points of the grid are tried", ErrExhausted, len(g.points))
}
