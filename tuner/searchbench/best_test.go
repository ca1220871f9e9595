package searchbench

import (
	"fmt"
	"math"
	"slices"
	"strconv"

	"golang.org/x/sync/errgroup"

	"vllmtuner/tuner/space"
)

// A best is the highest known true capacity of a world (an engine with a workload, limits and flags), and how it was
// found.
type best struct {
	truth
	how   string
	exact map[string]float64 // capacity of each finalist and each answer, measured with other draws of requests
	scale float64            // median of exact capacity / first capacity, because one set of draws may be harder
}

const (
	climbers  = 2     // number of points from which the search begins
	climbGain = 0.015 // least relative gain of a step; two points with the same draws differ by less than this by chance
	maxClimbs = 6     // largest number of rounds from one point; a round takes a step or halves it
	finalists = 6     // number of points that are measured again, in addition to the answers
)

// best returns the best point of a world, and the exact capacities of the answers. The candidates are all points whose
// truth (their true capacity) is on the disk. They include every point that a method has recommended. A search from the
// best of these points adds further candidates. This search changes one flag at a time, and halves its step when no
// change helps. The highest candidates and the answers are measured again with other draws (sets of random requests).
// The result of these draws decides.
func (b *truthBook) best(w world, answers []space.Point, parallel int) (best, error) {
	p, err := w.open(0)
	if err != nil {
		return best{}, err
	}
	all, err := b.known(w)
	if err != nil {
		return best{}, err
	}
	from := len(all)
	for _, t := range all[:min(climbers, from)] {
		if err := b.climb(w, p.Search.Space, t, parallel); err != nil {
			return best{}, err
		}
	}
	if all, err = b.known(w); err != nil || len(all) == 0 {
		return best{}, err
	}
	found := best{how: fmt.Sprintf("the best of %d points, and of %d more points near their best", from, len(all)-from)}
	return found, found.measureAgain(b, w, all, answers, parallel)
}

// measureAgain measures the finalists and the answers with other draws (sets of random requests), and keeps the best of
// them.
func (f *best) measureAgain(b *truthBook, w world, all []truth, answers []space.Point, parallel int) error {
	last := slices.Clone(answers)
	for _, t := range all[:min(finalists, len(all))] {
		if !slices.ContainsFunc(answers, func(p space.Point) bool { return p.String() == t.Point.String() }) {
			last = append(last, t.Point)
		}
	}
	exact, err := b.final().truthsOf(w, last, parallel)
	if err != nil {
		return err
	}
	before := map[string]float64{}
	for _, t := range all {
		if !t.Rough {
			before[t.Point.String()] = t.Capacity
		}
	}
	f.truth = slices.MaxFunc(exact, compareTruths)
	f.exact = map[string]float64{}
	var ratios []float64
	for _, t := range exact {
		f.exact[t.Point.String()] = t.Capacity
		if t.Capacity > 0 && before[t.Point.String()] > 0 {
			ratios = append(ratios, t.Capacity/before[t.Point.String()])
		}
	}
	f.scale = 1
	if len(ratios) > 0 {
		f.scale = median(ratios)
	}
	return nil
}

// climb goes from a point to its best neighbour, until no neighbour is better.
func (b *truthBook) climb(w world, s *space.Space, at truth, parallel int) error {
	stride := 1.0
	for range maxClimbs {
		neighbours := neighboursOf(s, at.Point, stride)
		truths, err := b.truthsOf(w, neighbours, parallel)
		if err != nil {
			return err
		}
		best := at
		for _, t := range truths {
			if t.Capacity > best.Capacity*(1+climbGain) {
				best = t
			}
		}
		switch {
		case best.Point.String() != at.Point.String():
			at = best
		case stride > 0.6:
			stride /= 2
		default:
			return nil
		}
	}
	return nil
}

// neighboursOf returns the legal points that differ from a point in one flag. A number differs by a tenth of its scale
// times the stride. A flag with choices has any other choice.
func neighboursOf(s *space.Space, p space.Point, stride float64) (all []space.Point) {
	u, active := s.Unit(p)
	seen := map[string]bool{p.String(): true}
	add := func(q space.Point) {
		if s.Check(q) == nil && !seen[q.String()] {
			seen[q.String()] = true
			all = append(all, q)
		}
	}
	for i, parameter := range s.Parameters() {
		if choices := choicesOf(parameter); len(choices) > 0 {
			for _, choice := range choices {
				add(with(p, parameter.Name, choice))
			}
			continue
		}
		if !active[i] { // the server's default has no place on the scale, so the steps begin in the middle
			u[i] = 0.5
		}
		for _, sign := range []float64{-1, 1} {
			moved := append([]float64{}, u...)
			moved[i] = min(max(0, u[i]+sign*0.1*stride), math.Nextafter(1, 0))
			add(with(p, parameter.Name, s.Sample(moved)[parameter.Name]))
		}
	}
	return all
}

func with(p space.Point, name, value string) space.Point {
	q := space.Point{name: value}
	for other, text := range p {
		if other != name {
			q[other] = text
		}
	}
	return q
}

// truthsOf returns the truths (the true capacities) of points, in the order of the points. It measures the first point
// alone, because the measurements of the others begin near the first point's capacity.
func (b *truthBook) truthsOf(w world, points []space.Point, parallel int) ([]truth, error) {
	truths := make([]truth, len(points))
	var group errgroup.Group
	group.SetLimit(parallel)
	for i, p := range points {
		measure := func() (err error) {
			truths[i], err = b.truthOf(w, p)
			return err
		}
		if i > 0 {
			group.Go(measure)
		} else if err := measure(); err != nil {
			return nil, err
		}
	}
	return truths, group.Wait()
}

// pointText writes a point in a few characters for tables: its values in the order of the parameters.
func pointText(s *space.Space, p space.Point) string {
	text := ""
	for i, parameter := range s.Parameters() {
		value, ok := p[parameter.Name]
		if !ok {
			value = "–"
		}
		if v, err := strconv.ParseFloat(value, 64); err == nil && v < 1 && v > 0 {
			value = strconv.FormatFloat(v, 'f', 2, 64)[1:]
		}
		if i > 0 {
			text += "/"
		}
		text += value
	}
	return text
}
