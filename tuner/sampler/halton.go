package sampler

import (
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/mat"
	"gonum.org/v1/gonum/stat/distmv"
	"gonum.org/v1/gonum/stat/samplemv"
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
