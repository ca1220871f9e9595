package insight

import (
	"math/rand/v2"

	"gonum.org/v1/gonum/stat"

	"vllmtuner/tuner/sampler"
	"vllmtuner/tuner/space"
)

const (
	// evaluations is the approximate number of points at which each drawn function is evaluated. It bounds the time.
	evaluations = 1200
	// minPairs is the smallest number of pairs of legal points for a Sobol index.
	minPairs = 30
	// maxTries is the largest number of points that are drawn for each legal point, on average.
	maxTries = 100
	// minRuns is the smallest probability that a server runs with a point. A point with a smaller probability counts as
	// not legal, because it has no capacity.
	minRuns = 0.5
)

// A sobol has the points at which a function must be known for its Sobol indices.
type sobol struct {
	points []space.Point
	pairs  []pair
}

// A pair has the indexes of two random points, a and b. For each flag it has the index of the point that is like a, but
// has the flag's value from b; -1 if that point is not legal.
type pair struct {
	a, b  int
	mixed []int
}

// newSobol draws the points. Points that are not legal, or not likely to run, are left out.
func newSobol(s *space.Space, m *sampler.Model, flags []int, rng *rand.Rand) *sobol {
	plan := drawSobol(s, flags, evaluations/(len(flags)+2), rng)
	plan.keepRunning(m)
	return plan
}

// drawSobol draws the points of up to n pairs. Points that are not legal are left out.
func drawSobol(s *space.Space, flags []int, n int, rng *rand.Rand) *sobol {
	cubes := legalCubes(s, 2*n, rng)
	plan := &sobol{}
	for n := 0; n+1 < len(cubes); n += 2 {
		a, b := cubes[n], cubes[n+1]
		p := pair{a: plan.add(s, a), b: plan.add(s, b)}
		for _, flag := range flags {
			u := append([]float64{}, a...)
			u[flag] = b[flag]
			p.mixed = append(p.mixed, plan.add(s, u))
		}
		plan.pairs = append(plan.pairs, p)
	}
	return plan
}

// legalCubes returns n random points of the unit cube that map to legal points of the space. If few points are legal,
// it returns fewer.
func legalCubes(s *space.Space, n int, rng *rand.Rand) (cubes [][]float64) {
	for range maxTries * n {
		u := make([]float64, len(s.Parameters()))
		for i := range u {
			u[i] = rng.Float64()
		}
		if s.Check(s.Sample(u)) == nil {
			cubes = append(cubes, u)
		}
		if len(cubes) == n {
			break
		}
	}
	return cubes
}

// add adds the point at u and returns the point's index. It returns -1 if the point is not legal.
func (plan *sobol) add(s *space.Space, u []float64) int {
	p := s.Sample(u)
	if s.Check(p) != nil {
		return -1
	}
	plan.points = append(plan.points, p)
	return len(plan.points) - 1
}

// keepRunning drops the points whose server is not likely to run.
func (plan *sobol) keepRunning(m *sampler.Model) {
	likely := m.Runs(plan.points)
	ok := func(i int) bool { return i >= 0 && likely[i] >= minRuns }
	var kept []pair
	for _, p := range plan.pairs {
		for i, mixed := range p.mixed {
			if !ok(mixed) {
				p.mixed[i] = -1
			}
		}
		if ok(p.a) && ok(p.b) {
			kept = append(kept, p)
		}
	}
	plan.pairs = kept
}

// fewest counts, for each flag, the pairs that have a legal mixed point. It returns the smallest of these numbers.
func (plan *sobol) fewest(flags int) int {
	least := len(plan.pairs)
	for i := range flags {
		n := 0
		for _, p := range plan.pairs {
			if p.mixed[i] >= 0 {
				n++
			}
		}
		least = min(least, n)
	}
	return least
}

// indices returns the variance of a function, and its first-order and total Sobol index for each flag. values[i] is the
// function's value at point i of the plan. The estimators are Jansen's (1999).
func (plan *sobol) indices(values []float64, flags int) (variance float64, first, total []float64) {
	first, total = make([]float64, flags), make([]float64, flags)
	var base []float64
	for _, p := range plan.pairs {
		base = append(base, values[p.a], values[p.b])
	}
	if variance = stat.Variance(base, nil); !(variance > 0) {
		return 0, first, total
	}
	for i := range flags {
		alone, with, n := 0.0, 0.0, 0.0
		for _, p := range plan.pairs {
			if j := p.mixed[i]; j >= 0 {
				alone += square(values[p.b] - values[j])
				with += square(values[p.a] - values[j])
				n++
			}
		}
		if n > 0 {
			first[i] = max(0, 1-alone/n/2/variance)
			total[i] = with / n / 2 / variance
		}
	}
	return variance, first, total
}

func square(x float64) float64 { return x * x }
