package sampler

import (
	"math/rand/v2"

	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// A Model is what the trials of a study say about the capacity of every point of its space. It is the Gaussian process
// of the sampler gp, whatever the study's own sampler is. Its values are ln(capacity); values far below the best are
// compressed, see knee.
type Model struct {
	space  *space.Space
	belief *belief
}

// modelVectors is the number of vectors of hyperparameters of a Model. With the few vectors of the search, a Model
// would be too sure which flags matter.
const modelVectors = 40

// NewModel fits the model to the finished trials of the history. It returns nil if too few of them have a capacity.
func NewModel(s *space.Space, seed uint64, history []studies.Trial) *Model {
	var finished []studies.Trial
	for _, t := range history {
		if t.State == studies.Done {
			finished = append(finished, t)
		}
	}
	l := learn(s, -1, finished)
	if len(s.Parameters()) == 0 || len(l.values) < max(2, l.minValues()) {
		return nil
	}
	return &Model{s, newBeliefOf(modelVectors, s, l, nil, stream(seed, "model", len(finished)))}
}

// Values returns the number of trials from which the model has learned a capacity, or a bound of one.
func (m *Model) Values() int { return len(m.belief.values) }

// Runs returns the probability that the server runs, for each point.
func (m *Model) Runs(points []space.Point) []float64 {
	return m.belief.feasible.runProbabilities(m.rows(points))
}

// Draw returns at least n functions that may be the true capacity. All are equally likely. Each function is given by
// its ln(capacity) at the points.
func (m *Model) Draw(n int, points []space.Point, rng *rand.Rand) (all [][]float64) {
	rows := m.rows(points)
	each := (n + len(m.belief.processes) - 1) / len(m.belief.processes)
	for _, p := range m.belief.processes {
		all = append(all, p.draw(each, rows, rng)...)
	}
	return all
}

func (m *Model) rows(points []space.Point) []row {
	rows := make([]row, len(points))
	for i, p := range points {
		rows[i] = m.belief.row(m.space, p)
	}
	return rows
}

// Complete returns the trial's point with the values that its absent flags had on the server, as far as these values
// are known. If the value of a flag without a condition is not known, whole is false.
func Complete(s *space.Space, t studies.Trial) (p space.Point, whole bool) {
	p = complete(s, t)
	for _, q := range s.Parameters() {
		if _, ok := p[q.Name]; !ok && q.When == "" {
			return p, false
		}
	}
	return p, true
}
