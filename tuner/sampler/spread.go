package sampler

import (
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// A spread fills the space evenly and learns nothing. Its points follow a sequence in the unit cube.
type spread struct {
	name  string
	space *space.Space
	seed  uint64
	// firstPoints returns the first n points of the sequence. With a larger n, its result begins with the same points.
	firstPoints func(dimensions, n int, seed uint64) [][]float64
}

// Next returns the first legal untried point of the sequence.
func (s *spread) Next(number int, history []studies.Trial) (space.Point, error) {
	known := Tried(history)
	skipped := 0
	for n := 64; n <= maxSpread; n *= 4 {
		rows := s.firstPoints(len(s.space.Parameters()), n, s.seed)
		for _, u := range rows[min(skipped, len(rows)):] {
			if p := s.space.Sample(u); !known[p.String()] && s.space.Check(p) == nil {
				return p, nil
			}
		}
		skipped = n
	}
	return draw(s.space, stream(s.seed, s.name+" instead", number), known)
}

// maxSpread limits how many points of the sequence are checked. Because of this limit, a space with few legal points
// costs less than a second.
const maxSpread = 4096
