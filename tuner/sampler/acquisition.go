package sampler

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

const (
	scattered = 300 // candidates anywhere in the space
	nearBest  = 150 // candidates near the best measured points
	nearTop   = 100 // candidates near the best candidates so far
)

// A candidate is a point that the next trial may try.
type candidate struct {
	point space.Point
	row   row
	gain  float64 // ln of the expected improvement (in ln units of the capacity) times the probability that the server runs
}

// A belief is what the model knows after a history.
type belief struct {
	trainingSet
	processes []*process // one for each drawn vector of hyperparameters
	best      []float64  // for each process, the highest mean at a measured point
	feasible  feasibility
	boldness  float64 // factor by which the standard deviations are multiplied
}

// newBelief fits the model. It needs at least minValues values.
func newBelief(s *space.Space, l trainingSet, rng *rand.Rand) *belief {
	return newBeliefOf(vectors, s, l, nil, rng)
}

// newBeliefOf fits the model with n vectors of hyperparameters. If shared is nil, the errors of the values are taken as
// independent.
func newBeliefOf(n int, s *space.Space, l trainingSet, shared *sharing, rng *rand.Rand) *belief {
	b := &belief{trainingSet: l, boldness: 1}
	h := &hyperprior{dimensions: dimensions(s, l.rows()), mean: l.mean, spread: l.spread, centres: l.centres(), misfit: l.misfit(), shared: shared}
	measured := l.own // priors were not measured here, so this study may still improve up to their capacities
	if len(measured) == 0 {
		measured = rowsOf(l.values)
	}
	for _, z := range h.sample(n, l.values, rng) {
		k, data, common := h.model(z, l.values)
		p := fitBounds(k, data, common, 3)
		means, _ := p.predict(measured)
		b.best = append(b.best, slices.Max(means))
		b.processes = append(b.processes, p.believe(l.pending))
	}
	b.feasible = newFeasibility(h.dimensions, l.labels)
	return b
}

// believe returns the process with the points as further data. The value of each point is the value that the process
// expects at the point (Ginsbourger's kriging believer). Parallel trials therefore spread out.
func (p *process) believe(points []row) *process {
	if len(points) == 0 {
		return p
	}
	means, _ := p.predict(points)
	data := slices.Clone(p.data)
	for i, r := range points {
		data = append(data, datum{row: r, value: means[i], variance: 1e-4})
	}
	return condition(p.kernel, data, p.common.grown(len(points)))
}

// judge gives the candidates their gains. The improvement of a candidate is measured from the best mean at a measured
// point. It is averaged over the drawn hyperparameters. The gain is not divided by the GPU time that the trial is
// expected to take. A server that does not run takes only its start, often a fortieth of a trial. But it uses up a trial
// of the budget: with that division, studies tried twelve points in a row that had no memory.
func (b *belief) judge(all []candidate) {
	rows := make([]row, len(all))
	for i := range all {
		rows[i], all[i].gain = all[i].row, math.Inf(-1)
	}
	for i, p := range b.processes {
		means, variances := p.predict(rows)
		for j := range all {
			all[j].gain = addLog(all[j].gain, logImprovement(means[j]-b.best[i], b.boldness*math.Sqrt(variances[j])))
		}
	}
	for i, runs := range b.feasible.runProbabilities(rows) {
		all[i].gain += math.Log(runs) - math.Log(float64(max(1, len(b.processes))))
		if len(b.processes) == 0 { // the model only knows which points do not run
			all[i].gain = math.Log(runs)
		}
	}
}

// logImprovement is ln E[max(0, x)] for a normal x. The computation uses logarithms, so it does not underflow for a
// mean far below 0.
func logImprovement(mean, sd float64) float64 {
	z := mean / sd
	switch {
	case z > -1:
		return math.Log(sd) + math.Log(distuv.UnitNormal.Prob(z)+z*distuv.UnitNormal.CDF(z))
	case z > -20:
		return math.Log(sd) + distuv.UnitNormal.LogProb(z) + math.Log1p(z/hazard(z))
	}
	return math.Log(sd) + distuv.UnitNormal.LogProb(z) - 2*math.Log(-z)
}

// addLog is ln(exp a + exp b).
func addLog(a, b float64) float64 {
	if a < b {
		a, b = b, a
	}
	if math.IsInf(a, -1) {
		return a
	}
	return a + math.Log1p(math.Exp(b-a))
}

// candidates returns candidates with their gains, the highest gain first.
func (b *belief) candidates(filter *pointFilter, history []studies.Trial, rng *rand.Rand) []candidate {
	var all []candidate
	dims := len(filter.space.Parameters())
	if dims == 0 {
		return nil // the only point is the server's default
	}
	known := map[string]bool{}
	add := func(u []float64) {
		p := filter.space.Sample(u)
		if name := p.String(); !known[name] {
			known[name] = true
			if filter.allows(p) {
				all = append(all, candidate{point: p, row: b.row(filter.space, p)})
			}
		}
	}
	for range scattered {
		u := make([]float64, dims)
		for i := range u {
			u[i] = rng.Float64()
		}
		add(u)
	}
	centres := b.bestPoints(history, 5)
	for _, t := range b.trends {
		centres = append(centres, t.best...)
	}
	for i := range nearBest * min(1, len(centres)) {
		u, _ := filter.space.Unit(centres[i%len(centres)])
		add(neighbour(filter.space, u, []float64{0.03, 0.1, 0.25}[rng.IntN(3)], rng))
	}
	b.judge(all)
	byGain := func(x, y candidate) int { return cmp.Compare(y.gain, x.gain) }
	slices.SortStableFunc(all, byGain)
	first := len(all)
	for i := range nearTop * min(1, first) {
		u, _ := filter.space.Unit(all[i%min(4, first)].point)
		add(neighbour(filter.space, u, []float64{0.02, 0.07}[rng.IntN(2)], rng))
	}
	b.judge(all[first:])
	slices.SortStableFunc(all, byGain)
	return all
}

// bestPoints returns up to n points with the highest means.
func (b *belief) bestPoints(history []studies.Trial, n int) []space.Point {
	var points []space.Point
	for _, i := range b.ranking() {
		if len(points) < n {
			points = append(points, history[b.trials[i]].Point)
		}
	}
	return points
}

// ranking returns the indexes of the belief's values. The value with the highest mean comes first.
func (b *belief) ranking() []int {
	means := b.means()
	order := make([]int, len(b.values))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(means[j], means[i]) })
	return order
}

// means returns the expected ln capacity at the point of each of the belief's values.
func (b *belief) means() []float64 {
	sum := make([]float64, len(b.values))
	for _, p := range b.processes {
		means, _ := p.predict(rowsOf(b.values))
		for i, m := range means {
			sum[i] += m / float64(len(b.processes))
		}
	}
	return sum
}

// neighbour returns a random neighbour of a point in the unit cube.
func neighbour(s *space.Space, u []float64, radius float64, rng *rand.Rand) []float64 {
	v := slices.Clone(u)
	parameters := s.Parameters()
	must := rng.IntN(len(v)) // the value at this index always changes
	for i := range v {
		switch {
		case i != must && rng.Float64() < 0.5:
		case choices(&parameters[i]) > 0:
			if i == must || rng.Float64() < 0.3 {
				v[i] = rng.Float64()
			}
		default:
			v[i] = min(max(v[i]+radius*rng.NormFloat64(), 0), 1)
		}
	}
	return v
}
