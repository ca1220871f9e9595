package calibrate

import (
	"context"
	"errors"
	"math"
	"slices"

	"gonum.org/v1/gonum/mat"
)

// A problem is a sum of squares to minimise over the logarithms of constants. Logarithms are suitable because constants
// are positive and their errors are relative.
type problem struct {
	// residuals returns (predicted - measured) / standard deviation of the measurement, always with the same length.
	residuals func(ctx context.Context, logs []float64) ([]float64, error)
	low, high []float64 // bounds of the logs
	step      float64   // step of the numeric derivatives; a large step reduces the effect of jumps of the prediction
}

const (
	// huberAt limits the weight of a residual (Huber, 1964). A residual up to huberAt standard deviations counts by its
	// square, and a larger one counts linearly. Otherwise a single probe could decide the whole fit, for example if the
	// simulated queue begins to grow a little early.
	huberAt = 3.0
	// maxSteps limits the steps of a fit.
	maxSteps = 20
	// maxFactor is the largest factor by which a constant may change in one step.
	maxFactor = 2.0
	// minGain decides when the fit has converged: a step reduces the cost by less than this fraction, or by less than
	// this value per residual.
	minGain = 2e-3
	// maxTries limits how often one step is tried, each time with more damping or a new slope.
	maxTries = 5
	// maxAge is the number of steps after which a slope is computed again. The slope is computed earlier if a step
	// reduces the cost by less than the fraction goodGain.
	maxAge, goodGain = 3, 0.5
)

// cost returns the sum of the Huber losses of the residuals.
func cost(residuals []float64) float64 {
	sum := 0.0
	for _, r := range residuals {
		if r = math.Abs(r); r <= huberAt {
			sum += r * r / 2
		} else {
			sum += huberAt * (r - huberAt/2)
		}
	}
	return sum
}

// weight returns the factor for a residual. Its square is the weight of the squared residual.
func weight(r float64) float64 {
	return math.Sqrt(min(1, huberAt/max(math.Abs(r), 1e-300)))
}

// A slope is the Jacobian of the residuals, with one column for the logarithm of each constant.
type slope struct {
	*mat.Dense
	rough []float64 // for each column: the estimated sum of the squared errors of its entries
}

// jacobian returns the slope for the free constants. The slice current has the residuals at the current values of logs.
// Central differences cost twice as much as forward differences and use twice the step. They average over jumps of the
// prediction, and show how large the jumps are.
func (p problem) jacobian(ctx context.Context, logs []float64, free []int, current []float64, central bool) (slope, error) {
	j := slope{mat.NewDense(len(current), len(free), nil), make([]float64, len(free))}
	for column, k := range free {
		step := p.step
		if central {
			step *= 2
		}
		up, down := min(logs[k]+step, p.high[k]), logs[k]
		if central || up == down { // at its upper bound a constant can only decrease
			down = max(logs[k]-step, p.low[k])
		}
		above, below := current, current
		var err error
		if up != logs[k] {
			if above, err = p.residualsAt(ctx, logs, k, up); err != nil {
				return j, err
			}
		}
		if down != logs[k] {
			if below, err = p.residualsAt(ctx, logs, k, down); err != nil {
				return j, err
			}
		}
		for i := range current {
			j.Set(i, column, (above[i]-below[i])/(up-down))
			if up != logs[k] && down != logs[k] {
				bend := weight(current[i]) * (above[i] - 2*current[i] + below[i]) / (up - down)
				// If the jumps at the three points are equally large, the square of bend is three times the mean effect
				// of the jumps. So the estimate is too large rather than too small.
				j.rough[column] += bend * bend
			}
		}
	}
	return j, nil
}

// weighted returns the slope with each row multiplied by the weight of its residual.
func (j slope) weighted(residuals []float64) slope {
	weighted := slope{new(mat.Dense), j.rough}
	weighted.Apply(func(i, _ int, v float64) float64 { return weight(residuals[i]) * v }, j)
	return weighted
}

// update corrects the slope with the observed effect of a step (Broyden, 1965). This needs no further replays.
func (j slope) update(move, before, after []float64) {
	length := 0.0
	for _, m := range move {
		length += m * m
	}
	if length == 0 {
		return
	}
	for i := range before {
		missed := after[i] - before[i]
		for k, m := range move {
			missed -= j.At(i, k) * m
		}
		for k, m := range move {
			j.Set(i, k, j.At(i, k)+missed*m/length)
		}
	}
}

// residualsAt returns the residuals after the logarithm of constant k is changed to the given value.
func (p problem) residualsAt(ctx context.Context, logs []float64, k int, value float64) ([]float64, error) {
	changed := slices.Clone(logs)
	changed[k] = value
	return p.residuals(ctx, changed)
}

// minimise moves the logs of the free constants to the minimum of the cost with the Levenberg-Marquardt method
// (Marquardt, 1963). It returns the residuals at the minimum. If maxSteps steps were not enough, converged is false.
// After an error, the slice logs has the best values so far.
func (p problem) minimise(ctx context.Context, logs []float64, free []int) (residuals []float64, converged bool, err error) {
	if residuals, err = p.residuals(ctx, logs); err != nil || len(free) == 0 {
		return residuals, true, err
	}
	d := &descent{problem: p, logs: logs, free: free, residuals: residuals, damping: 1e-2}
	for range maxSteps {
		gain, err := d.step(ctx)
		if err != nil {
			return d.residuals, false, err
		}
		if gain >= minGain*max(cost(d.residuals), float64(len(residuals))) || d.age > 1 {
			continue
		}
		if d.central {
			return d.residuals, true, nil
		}
		d.central, d.age, d.damping = true, 0, 1e-2 // near the minimum, forward differences are not exact enough
	}
	return d.residuals, false, nil
}

// A descent is the state of minimise.
type descent struct {
	problem
	logs      []float64
	free      []int
	residuals []float64
	damping   float64
	slope     slope
	central   bool
	age       int // steps since the slope was computed; 0 means that it must be computed
}

// step makes one step and returns the decrease of the cost. If no tried step decreases the cost, gain is 0.
func (d *descent) step(ctx context.Context) (gain float64, err error) {
	before := cost(d.residuals)
	for range maxTries {
		if d.age == 0 {
			if d.slope, err = d.jacobian(ctx, d.logs, d.free, d.residuals, d.central); err != nil {
				return 0, err
			}
		}
		d.age++
		move, err := dampedStep(d.slope.weighted(d.residuals).Dense, d.residuals, d.damping)
		if err != nil {
			d.damping *= 10
			continue
		}
		next, move := d.moved(d.logs, d.free, move)
		at, err := d.problem.residuals(ctx, next)
		if err != nil {
			return 0, err
		}
		if gain = before - cost(at); gain > 0 {
			d.slope.update(move, d.residuals, at)
			copy(d.logs, next)
			d.residuals, d.damping = at, max(d.damping/10, 1e-7)
			if d.age > maxAge || gain < goodGain*before {
				d.age = 0
			}
			return gain, nil
		}
		if d.age > 1 { // first try a new slope: the old one is more likely wrong than the damping
			d.age = 0
			continue
		}
		d.age = 1
		d.damping *= 10
	}
	d.age = 1
	return 0, nil
}

// moved returns the logs after a step of the free constants, and the step that was actually made. It shortens the step
// to stay within maxFactor and the bounds.
func (p problem) moved(logs []float64, free []int, move []float64) (next, moved []float64) {
	next = slices.Clone(logs)
	shrink := 1.0
	for _, m := range move {
		shrink = min(shrink, math.Log(maxFactor)/max(math.Abs(m), 1e-300))
	}
	for i, k := range free {
		next[k] = max(p.low[k], min(p.high[k], logs[k]+shrink*move[i]))
		moved = append(moved, next[k]-logs[k])
	}
	return next, moved
}

// dampedStep solves the normal equations with Marquardt's damping.
func dampedStep(j *mat.Dense, residuals []float64, damping float64) ([]float64, error) {
	wanted := make([]float64, len(residuals))
	for i, r := range residuals {
		wanted[i] = -weight(r) * r
	}
	step, err := leastSquares(j, wanted, func(k int) float64 { return math.Sqrt(damping) * max(norm(j, k), 1e-6) })
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(step, func(m float64) bool { return math.IsNaN(m) || math.IsInf(m, 0) }) {
		return nil, errors.New("no finite step")
	}
	return step, nil
}

// leastSquares approximates the column wanted by a linear combination of the columns of j. It returns the coefficient
// of each column. It uses a QR decomposition, with one more row for the damping of each column.
func leastSquares(j *mat.Dense, wanted []float64, damping func(column int) float64) ([]float64, error) {
	rows, columns := j.Dims()
	a := mat.NewDense(rows+columns, columns, nil)
	a.Copy(j)
	for k := range columns {
		a.Set(rows+k, k, damping(k))
	}
	b := mat.NewVecDense(rows+columns, append(slices.Clone(wanted), make([]float64, columns)...))
	var found mat.VecDense
	if err := found.SolveVec(a, b); err != nil {
		if _, isCondition := errors.AsType[mat.Condition](err); !isCondition {
			return nil, err
		}
	}
	return found.RawVector().Data, nil
}

// norm returns the Euclidean length of a column.
func norm(j *mat.Dense, column int) float64 { return mat.Norm(j.ColView(column), 2) }
