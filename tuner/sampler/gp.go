package sampler

import (
	"cmp"
	"math"
	"slices"

	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/tuner/space"
)

// modelTrials is the number of finished trials that the model needs. Until then points fill the space evenly.
const modelTrials = 4

// A GP is Bayesian optimisation with a Gaussian process over the logarithm of the capacity. It takes the candidate with
// the largest expected improvement per GPU time.
type GP struct {
	space  *space.Space
	seed   uint64
	design [][]float64
	set    settings
}

func newGP(s *space.Space, seed uint64) *GP {
	return &GP{space: s, seed: seed, design: design(len(s.Parameters()), designTrials, seed), set: defaults}
}

// Next returns a point of the design at the start, and later the candidate that promises the most.
func (g *GP) Next(number int, history []studies.Trial) (space.Point, error) {
	open := newOpening(g.space, history)
	l := learn(g.space, number, history)
	if !l.enough() && 0 <= number && number < len(g.design) {
		u := g.design[number]
		if g.set.centre {
			if number <= 1 {
				u = make([]float64, len(u))
				for i := range u {
					u[i] = 0.5
				}
			} else {
				u = g.design[number-1]
			}
		}
		if p := g.space.Sample(u); open.has(p) {
			return p, nil
		}
	}
	if best := g.best(number, history, l, open); best != nil {
		return best.point, nil
	}
	return open.draw(stream(g.seed, "gp instead", number))
}

// Promise returns the largest improvement that one more trial is expected to bring, in ln units of the capacity: 0.01
// is about 1 % of the best. It is +Inf while the model has too few trials, and 0 when no untried point is left.
func (g *GP) Promise(number int, history []studies.Trial) float64 {
	l := learn(g.space, number, history)
	if !l.enough() || len(l.values) < 2 {
		return math.Inf(1)
	}
	best := g.best(number, history, l, newOpening(g.space, history))
	if best == nil {
		return 0
	}
	return math.Exp(best.gain)
}

// enough reports whether the model can be fitted.
func (l *lessons) enough() bool { return len(l.values)+l.failed >= modelTrials }

// best returns the best candidate, or nil when there is none.
func (g *GP) best(number int, history []studies.Trial, l lessons, open *opening) *candidate {
	if len(g.space.Parameters()) == 0 {
		return nil
	}
	rng := stream(g.seed, "gp", number)
	b := &belief{lessons: l}
	if len(l.values) >= 2 {
		b = newBelief(g.space, l, rng, g.set)
	} else {
		var rows []row
		for _, d := range l.labels {
			rows = append(rows, d.row)
		}
		b.feasible = newFeasibility(dimensions(g.space, rows), l)
	}
	points := make([]space.Point, len(history))
	for i := range history {
		points[i] = history[i].Point
	}
	all := b.candidates(open, points, rng)
	if len(all) == 0 {
		return nil
	}
	return &all[0]
}

// Recommend returns the numbers of the n best measured trials, the best first. They are ranked by what the model
// expects of their points, not by what they measured: the highest of many measurements is mostly luck. Of trials with
// the same point the first one counts. Trials that never passed a probe follow only if no trial has passed one.
func Recommend(s *space.Space, seed uint64, history []studies.Trial, n int) []int {
	expected := expectations(s, seed, history)
	var order []int // indexes of the history
	known := map[string]bool{}
	passed := false
	for i, t := range history {
		if _, ok := expected[i]; ok && t.Number >= 0 && !known[t.Point.String()] {
			known[t.Point.String()] = true
			order = append(order, i)
			passed = passed || hasPassed(t)
		}
	}
	if passed {
		order = slices.DeleteFunc(order, func(i int) bool { return !hasPassed(history[i]) })
	}
	slices.SortStableFunc(order, func(i, j int) int { return cmp.Compare(expected[j], expected[i]) })
	var numbers []int
	for _, i := range order[:min(max(n, 0), len(order))] {
		numbers = append(numbers, history[i].Number)
	}
	return numbers
}

func hasPassed(t studies.Trial) bool { return t.Result.Capacity.Met() || t.Result.Capacity.Low > 0 }

// expectations returns the expected ln capacity of the measured trials by their index. A trial whose point is not fully
// known, such as the server's default, stands for itself: its value is drawn towards the mean by its error.
func expectations(s *space.Space, seed uint64, history []studies.Trial) map[int]float64 {
	l := learn(s, -1, history)
	expected := map[int]float64{}
	for i := range history {
		t := &history[i]
		if t.State != studies.Done || t.Result.Outcome != trial.Measured && t.Result.Outcome != trial.Dropped {
			continue
		}
		if d, ok := valueOf(t); ok && !math.IsNaN(d.value) {
			trust := 1.0
			if len(l.values) > 1 {
				trust = l.spread * l.spread / (l.spread*l.spread + d.err*d.err)
			}
			expected[i] = l.mean + trust*(d.value-l.mean)
		}
	}
	if len(l.values) < 2 {
		return expected
	}
	b := newBelief(s, l, stream(seed, "recommend", len(history)), defaults)
	for i, m := range b.means() {
		expected[l.trials[i]] = m
	}
	return expected
}
