package sampler

import (
	"math"
	"slices"

	"vllmtuner/tuner/space"
)

// A row is a point as the model sees it: one coordinate for each parameter.
type row []coordinate

// A coordinate is the value of one parameter.
type coordinate struct {
	at    float64 // position of a number in [0, 1]; 0.5 for a state
	state int     // aNumber, or a value that has no order with the others
}

// The states of a coordinate. Choices without an order have the states from 1 on.
const (
	aNumber = 0
	absent  = -1 // the flag is not active, or nobody knows the server's default
	off     = -2 // 0 speculative tokens: no small number of them, but another way to decode
)

// A dimension says how two values of one parameter are compared.
type dimension struct {
	numbers bool      // some values are numbers, and their distance counts
	states  bool      // some values have no order
	ranks   []float64 // positions of choices that are all numbers; nil when they are not
}

// dimensions returns how the parameters are compared. An absent value of an unconditional flag comes from the user's
// own args only.
func dimensions(s *space.Space, rows []row) []dimension {
	parameters := s.Parameters()
	all := make([]dimension, len(parameters))
	for i := range parameters {
		p := &parameters[i]
		d := dimension{ranks: ranks(p)}
		d.numbers = choices(p) == 0 || d.ranks != nil
		hasAbsent := func(r row) bool { return r[i].state == absent }
		d.states = !d.numbers || p.When != "" || p.Name == space.SpeculativeTokens || slices.ContainsFunc(rows, hasAbsent)
		all[i] = d
	}
	return all
}

// ranks returns a position from 0 to 1 for each choice of a parameter. It needs at least three choices, all of them
// numbers, such as 2048, 4096 and 8192. The positions follow the order of the numbers and are evenly spaced. For other
// parameters it returns nil.
func ranks(p *space.Parameter) []float64 {
	if p.Kind != space.Categorical || len(p.Choices) < 3 {
		return nil
	}
	var values []float64
	for _, c := range p.Choices {
		v, err := p.Number(c)
		if err != nil {
			return nil
		}
		values = append(values, v)
	}
	sorted := slices.Sorted(slices.Values(values))
	at := make([]float64, len(values))
	for i, v := range values {
		at[i] = float64(slices.Index(sorted, v)) / float64(len(values)-1)
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
		case q.Name == space.SpeculativeTokens && isZero(q, p[q.Name]):
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

// A kernel is the covariance of the function at two points. Over the numbers that every point has, it is a Matérn kernel
// of order 5/2 with a length for each. Each parameter with states multiplies it: by 1 for equal states, by alike for
// different states, and by something between for two numbers. So an inactive flag is equally far from all its values.
type kernel struct {
	dimensions []dimension
	signal     float64   // variance
	constant   float64   // variance of the unknown mean
	linear     float64   // variance of the slope over the range of a number; 0 in the model of the capacity
	inverse    []float64 // by dimension, 1/length of numbers
	alike      []float64 // by dimension, correlation of different states
}

// at returns the covariance at two points.
func (k *kernel) at(a, b row) float64 {
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
