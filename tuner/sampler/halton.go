package sampler

import (
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/mat"
	"gonum.org/v1/gonum/stat/distmv"
	"gonum.org/v1/gonum/stat/samplemv"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// design returns the first n points of a sequence that fills the unit cube evenly: Owen's scrambled Halton sequence. A
// longer design begins with the same points.
func design(dimensions, n int, seed uint64) [][]float64 {
	if dimensions == 0 {
		return nil
	}
	m := mat.NewDense(n, dimensions, nil)
	samplemv.Halton{Kind: samplemv.Owen, Q: distmv.NewUnitUniform(dimensions, nil), Src: rand.NewPCG(seed, 0)}.Sample(m)
	rows := make([][]float64, n)
	for i := range rows {
		rows[i] = slices.Clone(m.RawRowView(i))
	}
	return rows
}

// A halton fills the space evenly and learns nothing. Gonum has no Sobol sequence, and goptuna's is not scrambled, so
// that all its seeds give the same points.
type halton struct {
	space *space.Space
	seed  uint64
}

// Next returns the first legal untried point of the sequence.
func (h *halton) Next(number int, history []studies.Trial) (space.Point, error) {
	known := tried(history)
	skipped := 0
	for n := 64; n <= maxHalton; n *= 4 {
		rows := design(len(h.space.Parameters()), n, h.seed)
		for _, u := range rows[min(skipped, len(rows)):] {
			if p := h.space.Sample(u); !known[p.String()] && h.space.Check(p) == nil {
				return p, nil
			}
		}
		skipped = n
	}
	return draw(h.space, stream(h.seed, "halton instead", number), known)
}

// maxHalton bounds the points of the sequence that are looked at, so that a space in which few points are legal costs
// less than a second.
const maxHalton = 4096
