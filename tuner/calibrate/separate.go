package calibrate

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/mat"
)

const (
	// maxError is the largest relative standard error of a known constant.
	maxError = 0.20
	// anchorError is a limit for anchors (facts about the device or the model). If the standard error of an anchor is
	// at most this limit, the anchor is not held in place of another constant. Then the data are more exact than the
	// anchor's first value.
	anchorError = maxError / 4
	// priorWidth is the standard deviation of a constant's logarithm before the fit. The first profile is assumed to be
	// right within a factor of about two. Constants that the data do not determine keep this uncertainty, which adds to
	// the errors of other constants.
	priorWidth = math.Ln2
	// minEffect is the smallest share of a held constant's effect that a known constant must reproduce. From this share
	// on, the report names the two constants together.
	minEffect = 0.3
)

// A separation says which constants the data determine. It is computed from the Jacobian: the derivatives of the
// weighted residuals with respect to the logarithms of the constants.
type separation struct {
	known   []bool    // for each constant: the data determine it if the constants that are not known keep their values
	errors  []float64 // standard errors of the logs, including the uncertainty of constants that are not known
	visible []bool    // for each constant: the data would determine it if all other constants were known
	groups  [][]int   // for each visible constant that is not known: the known constants that reproduce its effect
}

// together maps each known constant to the held constants whose effect it contains.
func (r separation) together() map[int][]int {
	stands := map[int][]int{}
	for k, group := range r.groups {
		for _, other := range group {
			stands[other] = append(stands[other], k)
		}
	}
	return stands
}

// separate finds the constants that the data determine. It holds the constant with the largest standard error, and
// repeats this until all other constants are known. An anchor is a fact about the device or the model. If an anchor can
// have the same effect as the constant to hold, separate holds the anchor instead.
func separate(j slope, anchors []bool) separation {
	_, n := j.Dims()
	r := separation{known: make([]bool, n), visible: make([]bool, n), groups: make([][]int, n)}
	var free []int
	for k := range n {
		if r.visible[k] = norm(j.Dense, k) > 1/maxError; r.visible[k] {
			free = append(free, k)
		}
	}
	for {
		worst := leastKnown(j, free, anchors)
		if worst < 0 {
			break
		}
		free = slices.Delete(free, worst, worst+1)
	}
	for _, k := range free {
		r.known[k] = true
	}
	r.regroup(j)
	r.errors = standardErrors(j, indexes(n))
	return r
}

// indexes returns the numbers from 0 to n-1.
func indexes(n int) []int {
	all := make([]int, n)
	for k := range all {
		all[k] = k
	}
	return all
}

// free returns the known constants.
func (r separation) free() (free []int) {
	for k, known := range r.known {
		if known {
			free = append(free, k)
		}
	}
	return free
}

// leastKnown returns the constant to hold next, as an index into the slice free. This is the constant with the largest
// standard error. An anchor takes its place if the anchor can have the same effect and its error is above anchorError.
// If all free constants are known, the result is -1.
func leastKnown(j slope, free []int, anchors []bool) int {
	errs := standardErrors(j, free)
	worst := -1
	for i, e := range errs {
		if e > maxError && (worst < 0 || e > errs[worst]) {
			worst = i
		}
	}
	if worst < 0 || anchors[free[worst]] {
		return worst
	}
	others := slices.Delete(slices.Clone(free), worst, worst+1)
	for _, k := range standIns(j.Dense, free[worst], others) {
		if i := slices.Index(free, k); anchors[k] && errs[i] > anchorError {
			return i
		}
	}
	return worst
}

// release makes a held constant free.
func (r *separation) release(j slope, k int) {
	r.known[k] = true
	r.regroup(j)
}

// regroup finds the known constants that reproduce the effect of each held constant.
func (r *separation) regroup(j slope) {
	free := r.free()
	for k := range r.groups {
		r.groups[k] = nil
		if r.visible[k] && !r.known[k] {
			r.groups[k] = standIns(j.Dense, k, free)
		}
	}
}

// standardErrors returns the standard errors of the logs of the constants in columns, as if all other constants were
// known. The errors include the uncertainty before the fit (priorWidth). Errors of the slope would look like
// information that separates two constants. So the squares of these errors are subtracted.
func standardErrors(j slope, columns []int) []float64 {
	n := len(columns)
	errs := make([]float64, n)
	information := mat.NewSymDense(n, nil)
	for a, k := range columns {
		for b := a; b < n; b++ {
			information.SetSym(a, b, mat.Dot(j.ColView(k), j.ColView(columns[b])))
		}
		information.SetSym(a, a, information.At(a, a)-j.rough[k])
	}
	var eigen mat.EigenSym
	if !eigen.Factorize(information, true) { // a slope is not finite: the data determine nothing
		for c := range errs {
			errs[c] = math.Inf(1)
		}
		return errs
	}
	var v mat.Dense
	eigen.VectorsTo(&v)
	for s, value := range eigen.Values(nil) {
		for c := range errs {
			errs[c] += v.At(c, s) * v.At(c, s) / (max(value, 0) + 1/priorWidth/priorWidth)
		}
	}
	for c := range errs {
		errs[c] = math.Sqrt(errs[c])
	}
	return errs
}

// standIns returns the known constants that can reproduce the effect of a held constant. A least-squares fit
// approximates the column of the held constant by the columns of the known constants. The stand-ins have large
// coefficients in this fit.
func standIns(j *mat.Dense, held int, known []int) (group []int) {
	for c, share := range coefficients(j, held, known) {
		if math.Abs(share)*norm(j, known[c]) >= minEffect*norm(j, held) {
			group = append(group, known[c])
		}
	}
	return group
}

// unexplained approximates a column by the other columns, with least squares. It returns the length of the remaining
// residual.
func unexplained(j *mat.Dense, column int, others []int) float64 {
	rest := mat.VecDenseCopyOf(j.ColView(column))
	for c, share := range coefficients(j, column, others) {
		rest.AddScaledVec(rest, -share, j.ColView(others[c]))
	}
	return mat.Norm(rest, 2)
}

// coefficients approximates a column by a linear combination of the other columns, with least squares. It returns the
// coefficient of each other column.
func coefficients(j *mat.Dense, column int, others []int) []float64 {
	if len(others) == 0 {
		return nil
	}
	rows, _ := j.Dims()
	a := mat.NewDense(rows, len(others), nil)
	for c, k := range others {
		a.SetCol(c, mat.Col(nil, k, j))
	}
	// Without damping, two similar columns could get large coefficients of opposite signs.
	found, err := leastSquares(a, mat.Col(nil, column, j), func(c int) float64 { return 0.01 * norm(a, c) })
	if err != nil {
		return nil
	}
	return found
}
