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

// minValues is the number of capacities that the model needs.
const minValues = 2

// evenBoldness is the factor of the standard deviations in trials with an even number. The odd ones look closer at what
// is good, the even ones at what is unknown. See GP.
const evenBoldness = 1.6

// A GP is Bayesian optimisation with a Gaussian process over the logarithm of the capacity. It takes the candidate with
// the largest expected improvement per GPU time.
type GP struct {
	space  *space.Space
	seed   uint64
	design [][]float64
}

func newGP(s *space.Space, seed uint64) *GP {
	return &GP{space: s, seed: seed, design: design(len(s.Parameters()), designTrials, seed)}
}

// Next returns a point of the design at the start, and later the candidate that promises the most.
func (g *GP) Next(number int, history []studies.Trial) (space.Point, error) {
	open := newOpening(g.space, history)
	l := learn(g.space, number, history)
	if !l.enough() && 0 <= number && number < len(g.design) {
		if p := g.space.Sample(g.design[number]); open.has(p) {
			return p, nil
		}
	}
	b := g.believe(number, l)
	if number%2 == 0 {
		b.boldness = evenBoldness
	}
	if all := b.candidates(open, history, stream(g.seed, "gp candidates", number)); len(all) > 0 {
		return all[0].point, nil
	}
	return open.draw(stream(g.seed, "gp instead", number))
}

// Promise returns the largest improvement that the trial of that number is expected to bring, in ln units of the
// capacity: 0.01 is about 1 % of the best. It is +Inf while the model has too few trials, and 0 when no untried point is
// left.
func (g *GP) Promise(number int, history []studies.Trial) float64 {
	l := learn(g.space, number, history)
	if !l.enough() || len(l.values) < minValues {
		return math.Inf(1)
	}
	gain := math.Inf(-1)
	b := g.believe(number, l)
	for _, c := range b.candidates(newOpening(g.space, history), history, stream(g.seed, "gp candidates", number)) {
		gain = max(gain, c.gain)
	}
	return math.Exp(gain)
}

// enough reports whether the model replaces the design.
func (l *lessons) enough() bool { return len(l.values)+l.failed >= modelTrials }

// believe fits the model to the lessons. With too few values it only knows which points fail.
func (g *GP) believe(number int, l lessons) *belief {
	if len(l.values) >= minValues {
		return newBelief(g.space, l, stream(g.seed, "gp", number))
	}
	return &belief{lessons: l, feasible: newFeasibility(dimensions(g.space, l.rows()), l)}
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
			if len(l.values) >= minValues {
				trust = l.spread * l.spread / (l.spread*l.spread + d.err*d.err)
			}
			expected[i] = l.mean + trust*(d.value-l.mean)
		}
	}
	if len(l.values) < minValues {
		return expected
	}
	b := newBelief(s, l, stream(seed, "recommend", len(history)))
	for i, m := range b.means() {
		expected[l.trials[i]] = m
	}
	return expected
}
