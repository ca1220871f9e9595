package sampler

import (
	"fmt"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// A grid is the full factorial over evenly spaced levels of each parameter, in a seeded order.
type grid struct {
	points []space.Point
}

// newGrid chooses the levels so that the grid has as many legal points as fit the budget.
func newGrid(s *space.Space, seed uint64, budget int) *grid {
	parameters := s.Parameters()
	levels := make([]int, len(parameters))
	for i := range levels {
		levels[i] = min(2, most(&parameters[i]))
	}
	best := points(s, levels)
	for i, stuck := 0, 0; stuck < len(levels); i = (i + 1) % len(levels) {
		more := append([]int{}, levels...)
		more[i]++
		larger := []space.Point(nil)
		if more[i] <= most(&parameters[i]) {
			larger = points(s, more)
		}
		if len(larger) == 0 || len(larger) > budget {
			stuck++
			continue
		}
		levels, best, stuck = more, larger, 0
	}
	stream(seed, "grid", 0).Shuffle(len(best), func(i, j int) { best[i], best[j] = best[j], best[i] })
	return &grid{best}
}

// mostLevels bounds the levels of a parameter with a continuous range.
const mostLevels = 64

func most(p *space.Parameter) int { return len(p.Levels(mostLevels)) }

// points returns the legal points of a factorial, each once.
func points(s *space.Space, levels []int) []space.Point {
	parameters := s.Parameters()
	var legal []space.Point
	known := map[string]bool{}
	size := 1
	for _, n := range levels {
		size *= n
	}
	for code := range size {
		p := space.Point{}
		for i := range parameters {
			l := parameters[i].Levels(levels[i])
			p[parameters[i].Name] = l[code%levels[i]%len(l)]
			code /= levels[i]
		}
		u, _ := s.Unit(p)
		p = s.Sample(u) // leaves out what is inactive
		if name := p.String(); !known[name] && s.Check(p) == nil {
			known[name] = true
			legal = append(legal, p)
		}
	}
	return legal
}

// Next returns the first point of the grid that was not tried.
func (g *grid) Next(_ int, history []studies.Trial) (space.Point, error) {
	known := tried(history)
	for _, p := range g.points {
		if !known[p.String()] {
			return p, nil
		}
	}
	return nil, fmt.Errorf("%w: all %d points of the grid are tried", ErrExhausted, len(g.points))
}
