package sampler

import (
	"maps"
	"math"
	"slices"

	"vllmtuner/tuner/space"
)

// A row is a point as the model sees it. It has one coordinate for each parameter, followed by the value of each trend
// at the point.
type row []coordinate

// A coordinate is the value of one parameter.
type coordinate struct {
	at    float64 // position of a number in [0, 1]; 0.5 for a state
	state int     // aNumber, or a value that has no order with the others
}

// These are the states of a coordinate. Choices without an order have the states from 1 on.
const (
	aNumber = 0
	absent  = -1 // the flag is not active, or nobody knows the server's default
	off     = -2 // 0 speculative tokens, or a variable that is not set: this is another way to run, not a small number
)

// A dimension says how two values of one parameter are compared.
type dimension struct {
	numbers bool      // some values are numbers, and their distance counts
	states  bool      // some values have no order
	ranks   []float64 // positions of choices that are all numbers; nil when they are not
}

// dimensions returns how the parameters are compared. A flag without a condition can be absent only in the user's own
// args. A variable can also be absent in the default and in presets.
func dimensions(s *space.Space, rows []row) []dimension {
	parameters := s.Parameters()
	all := make([]dimension, len(parameters))
	for i := range parameters {
		p := &parameters[i]
		d := dimension{ranks: ranks(p)}
		d.numbers = choices(p) == 0 || d.ranks != nil
		hasAbsent := func(r row) bool { return r[i].state == absent }
		d.states = !d.numbers || p.When != "" || p.HasUnset() || p.Name == space.SpeculativeTokens || slices.ContainsFunc(rows, hasAbsent)
		all[i] = d
	}
	return all
}

// ranks returns a position from 0 to 1 for each choice of a parameter. It needs at least three choices that are
// numbers, such as 2048, 4096 and 8192. Besides these, only the choice of an unset variable is allowed. The positions
// follow the order of the numbers and are evenly spaced. For other parameters ranks returns nil.
func ranks(p *space.Parameter) []float64 {
	if p.Kind != space.Categorical {
		return nil
	}
	values := map[string]float64{}
	for _, c := range p.Choices {
		v, err := p.Number(c)
		switch {
		case p.IsUnset(c): // rowOf gives it a state
		case err != nil:
			return nil
		default:
			values[c] = v
		}
	}
	if len(values) < 3 {
		return nil
	}
	sorted := slices.Sorted(maps.Values(values))
	at := make([]float64, len(p.Choices))
	for i, c := range p.Choices {
		if v, ok := values[c]; ok {
			at[i] = float64(slices.Index(sorted, v)) / float64(len(values)-1)
		}
	}
	return at
}

// rowOf returns the point as a row.
func rowOf(s *space.Space, p space.Point) row {
	u, active := s.Unit(p)
	parameters := s.Parameters()
	r := make(row, len(u))
	for i := range r {
		q := &parameters[i]
		n := choices(q)
		switch {
		case !active[i]:
			r[i] = coordinate{0.5, absent}
		case q.Name == space.SpeculativeTokens && isZero(q, p[q.Name]), q.IsUnset(p[q.Name]):
			r[i] = coordinate{0.5, off}
		case n == 0:
			r[i] = coordinate{u[i], aNumber}
		default:
			r[i] = coordinate{0.5, 1 + min(n-1, int(u[i]*float64(n)))}
			if at := ranks(q); at != nil {
				r[i] = coordinate{at[r[i].state-1], aNumber}
			}
		}
	}
	return r
}

func isZero(p *space.Parameter, text string) bool {
	v, err := p.Number(text)
	return err == nil && v == 0
}

// A kernel is the covariance of the function at two points. Over the numbers that every point has, it is a Matérn
// kernel of order 5/2, with one length for each number. Each parameter with states multiplies the covariance by a
// factor. The factor is 1 for equal states, and the value in the field alike for different states. For two numbers, the
// factor lies between these two values. So an inactive flag is equally far from all its values.
type kernel struct {
	dimensions []dimension
	mean       float64   // mean of the function before the data, where all trends are 0
	slopes     []float64 // for each trend, the rise of the function when the trend rises by 1
	signal     float64   // variance
	constant   float64   // variance of the unknown mean
	linear     float64   // variance of the slope over the range of a number; 0 in the model of the capacity
	inverse    []float64 // 1/length of the numbers, for each dimension
	alike      []float64 // correlation of different states, for each dimension
}

// meanAt returns the mean of the function at a row before the data.
func (k *kernel) meanAt(r row) float64 {
	mean := k.mean
	for i, slope := range k.slopes {
		mean += slope * r[len(k.dimensions)+i].at
	}
	return mean
}

// covariance returns the covariance at two points.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (k *kernel) covariance(a, b row) float64 {
	square, product, slope := 0.0, 1.0, 0.0
	for i := range k.dimensions {
		d := &k.dimensions[i]
		x, y := &a[i], &b[i]
		difference := (x.at - y.at) * k.inverse[i]
		switch {
		case !d.states:
			square += difference * difference
		case x.state != y.state:
			product *= k.alike[i]
		case x.state == aNumber && difference != 0:
			product *= k.alike[i] + (1-k.alike[i])*matern(difference*difference)
		}
		slope += (x.at - 0.5) * (y.at - 0.5)
	}
	return k.constant + k.linear*slope + k.signal*product*matern(square)
}

// matern is the Matérn correlation of order 5/2 at a squared distance.
func matern(square float64) float64 {
	r := math.Sqrt(5 * square)
	return (1 + r + r*r/3) * math.Exp(-r)
}
