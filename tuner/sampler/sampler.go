// Package sampler chooses the next point from the history of a study. It never measures anything.
package sampler

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// ErrExhausted is returned by Next when the sampler has no further point to offer.
var ErrExhausted = errors.New("the sampler has no further point")

// A Sampler chooses the next point. The history may begin with priors: trials with a negative number, which were
// measured elsewhere and scaled to this study. Next depends on its arguments and the sampler's seed alone, so a resumed
// study chooses the same points.
type Sampler interface {
	Next(number int, history []studies.Trial) (space.Point, error)
}

// names are the samplers that New knows.
var names = []string{"gp", "tpe", "random", "sobol", "halton", "grid"}

// New returns the sampler with the given name. budget is the number of trials that the study may have.
func New(name string, s *space.Space, seed uint64, budget int) (Sampler, error) {
	switch name {
	case "gp":
		return newGP(s, seed), nil
	case "tpe":
		return newTPE(s, seed), nil
	case "halton":
		return &spread{name, s, seed, design}, nil
	case "sobol":
		return newSobol(s, seed)
	case "random":
		return &random{s, seed}, nil
	case "grid":
		return newGrid(s, seed, budget)
	}
	return nil, fmt.Errorf("unknown sampler %q; %s (known: %s)", name, space.DidYouMean(name, names), strings.Join(names, ", "))
}

// maxDraws bounds how often a sampler draws again when a point is not legal or was tried before.
const maxDraws = 1000

// random draws every point independently.
type random struct {
	space *space.Space
	seed  uint64
}

// Next returns an untried legal point.
func (r *random) Next(number int, history []studies.Trial) (space.Point, error) {
	return draw(r.space, stream(r.seed, "random", number), Tried(history))
}

// draw returns a random untried legal point.
func draw(s *space.Space, rng *rand.Rand, tried map[string]bool) (space.Point, error) {
	var last error
	for range maxDraws {
		u := make([]float64, len(s.Parameters()))
		for i := range u {
			u[i] = rng.Float64()
		}
		p := s.Sample(u)
		if last = s.Check(p); last == nil && !tried[p.String()] {
			return p, nil
		}
	}
	if last != nil {
		return nil, fmt.Errorf("%w: none of %d random points is legal, the last one because %w", ErrExhausted, maxDraws, last)
	}
	return nil, fmt.Errorf("%w: all of %d random points were tried before", ErrExhausted, maxDraws)
}

// Tried returns the points of the history as strings. A point counts as tried even if its trial failed for a reason
// that has nothing to do with the point, because the search has other points. A prior does not count, because a good
// prior should be tried here.
func Tried(history []studies.Trial) map[string]bool {
	all := make(map[string]bool, len(history))
	for _, t := range history {
		if t.Number >= 0 {
			all[t.Point.String()] = true
		}
	}
	return all
}

// stream returns the random numbers for one purpose of one trial.
func stream(seed uint64, purpose string, number int) *rand.Rand {
	h := fnv.New64a()
	fmt.Fprint(h, purpose, " ", number)
	return rand.New(rand.NewPCG(seed, h.Sum64()))
}
