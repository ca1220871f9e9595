package calibrate

import (
	"errors"
	"math"
	"slices"

	"gonum.org/v1/gonum/mat"
)

const (
	// mostError is the standard error of a constant, as a part of it, up to which the data tell it.
	mostError = 0.20
	// certain is the standard error up to which a fact of the device or the model is better told by the data.
	certain = mostError / 4
	// believed is the standard deviation of a constant's logarithm before there are data: the profile that the fit begins with
	// is taken to be right within a factor of two or so. What the data do not tell keeps this uncertainty, and passes it on.
	believed = math.Ln2
	// partner is how much of a constant's effect another one must be able to stand in for to be named.
	partner = 0.3
)

// A reading is what data say of the constants, from the Jacobian of the weighted residuals by their logarithms.
type reading struct {
	told   []bool    // by constant: the data tell it, once those that they do not tell stay where they are
	errors []float64 // standard errors of the logs, with the uncertainty of what is not told
	shows  []bool    // the constant alone, all others known, would be told
	groups [][]int   // by constant that shows and is not told: those that can stand in for it
}

// together are the told constants that stand in for others, each with those.
func (r reading) together() map[int][]int {
	stands := map[int][]int{}
	for k, group := range r.groups {
		for _, other := range group {
			stands[other] = append(stands[other], k)
		}
	}
	return stands
}

// separate says which constants the data tell. One after the other the constant with the largest standard error is held where it
// is until the rest is told; a fact about the device or the model (an
// anchor) is held rather than what it stands in for.
func separate(j slope, anchors []bool) reading {
	_, n := j.Dims()
	r := reading{told: make([]bool, n), shows: make([]bool, n), groups: make([][]int, n)}
	var free []int
	for k := range n {
		if r.shows[k] = norm(j.Dense, k) > 1/mostError; r.shows[k] {
			free = append(free, k)
		}
	}
	for {
		worst := leastTold(j, free, anchors)
		if worst < 0 {
			break
		}
		free = slices.Delete(free, worst, worst+1)
	}
	for _, k := range free {
		r.told[k] = true
	}
	r.regroup(j)
	all := make([]int, n)
	for k := range all {
		all[k] = k
	}
	r.errors = standardErrors(j, all)
	return r
}

// leastTold returns the place of the constant to be held next, -1 when all of free are told: the one with the largest standard
// error, or an anchor that stands in for it and is not certain itself.
func leastTold(j slope, free []int, anchors []bool) int {
	errs := standardErrors(j, free)
	worst := -1
	for i, e := range errs {
		if e > mostError && (worst < 0 || e > errs[worst]) {
			worst = i
		}
	}
	if worst < 0 || anchors[free[worst]] {
		return worst
	}
	others := slices.Delete(slices.Clone(free), worst, worst+1)
	for _, k := range standIns(j.Dense, free[worst], others) {
		if i := slices.Index(free, k); anchors[k] && errs[i] > certain {
			return i
		}
	}
	return worst
}

// tell lets a held constant go.
func (r *reading) tell(j slope, k int) {
	r.told[k] = true
	r.regroup(j)
}

// regroup finds what stands in for what is held.
func (r *reading) regroup(j slope) {
	var free []int
	for k, told := range r.told {
		if told {
			free = append(free, k)
		}
	}
	for k := range r.groups {
		r.groups[k] = nil
		if r.shows[k] && !r.told[k] {
			r.groups[k] = standIns(j.Dense, k, free)
		}
	}
}

// standardErrors returns the standard errors of the logs of some constants when all others are known, with what was believed of
// them before. A slope's own errors look like information that tells two constants apart: they are taken out of the squares.
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
	if !eigen.Factorize(information, true) { // it is not finite: nothing is told
		for c := range errs {
			errs[c] = math.Inf(1)
		}
		return errs
	}
	var v mat.Dense
	eigen.VectorsTo(&v)
	for s, value := range eigen.Values(nil) {
		for c := range errs {
			errs[c] += v.At(c, s) * v.At(c, s) / (max(value, 0) + 1/believed/believed)
		}
	}
	for c := range errs {
		errs[c] = math.Sqrt(errs[c])
	}
	return errs
}

// standIns returns which of the told constants can do what a held one does: those that the best combination of them uses.
func standIns(j *mat.Dense, held int, told []int) (group []int) {
	for c, share := range shares(j, held, told) {
		if math.Abs(share)*norm(j, told[c]) >= partner*norm(j, held) {
			group = append(group, told[c])
		}
	}
	return group
}

// unexplained is how much of a column the best combination of others leaves.
func unexplained(j *mat.Dense, column int, others []int) float64 {
	rest := mat.VecDenseCopyOf(j.ColView(column))
	for c, share := range shares(j, column, others) {
		rest.AddScaledVec(rest, -share, j.ColView(others[c]))
	}
	return mat.Norm(rest, 2)
}

// shares returns the combination of columns that is nearest to another one.
func shares(j *mat.Dense, column int, others []int) []float64 {
	if len(others) == 0 {
		return nil
	}
	rows, _ := j.Dims()
	a := mat.NewDense(rows+len(others), len(others), nil)
	b := mat.NewVecDense(rows+len(others), nil)
	for i := range rows {
		b.SetVec(i, j.At(i, column))
		for c, k := range others {
			a.Set(i, c, j.At(i, k))
		}
	}
	for c, k := range others { // a little damping, lest two that are alike take opposite sides
		a.Set(rows+c, c, 0.01*norm(j, k))
	}
	var found mat.VecDense
	if err := found.SolveVec(a, b); err != nil {
		if _, isCondition := errors.AsType[mat.Condition](err); !isCondition {
			return nil
		}
	}
	return found.RawVector().Data
}
