package calibrate

import (
	"context"
	"errors"
	"math"
	"slices"

	"gonum.org/v1/gonum/mat"
)

// A problem is a sum of squares to minimise over the logarithms of constants: all constants are positive, and their
// uncertainty is multiplicative.
type problem struct {
	// residuals returns (predicted - measured) / standard deviation of the measurement, always with the same length.
	residuals func(ctx context.Context, logs []float64) ([]float64, error)
	low, high []float64 // bounds of the logs
	step      float64   // step of the numeric derivatives; a large step reduces the effect of jumps of the prediction
}

const (
	// huberAt is the number of standard deviations up to which a residual counts by its square; a larger one counts
	// linearly (Huber, 1964). Otherwise one probe where the model begins to queue a little early would decide the whole
	// fit.
	huberAt = 3.0
	// maxSteps limits the steps of a fit.
	maxSteps = 20
	// maxFactor is the largest factor by which a constant may change in one step.
	maxFactor = 2.0
	// enough is the gain of a step, as a part of the cost or per residual, below which the fit has converged.
	enough = 2e-3
	// maxTries limits how often a step is shortened.
	maxTries = 5
	// A slope is computed anew after maxAge steps, or at once after a step that gains less than goodGain of the cost.
	maxAge, goodGain = 3, 0.5
)

// cost returns the sum of the Huber losses.
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

// weight returns the square root of the weight of a residual's square.
func weight(r float64) float64 {
	return math.Sqrt(min(1, huberAt/max(math.Abs(r), 1e-300)))
}

// A slope is the Jacobian of the residuals by the logarithms of constants, one column each.
type slope struct {
	*mat.Dense
	rough []float64 // for each column: the estimated sum of the squared errors of its entries
}

// jacobian returns the slope by the free constants; at has the residuals at logs. Central differences cost twice as
// much as forward differences and take twice the step. They average over jumps of the prediction, and show how large
// these are.
func (p problem) jacobian(ctx context.Context, logs []float64, free []int, at []float64, central bool) (slope, error) {
	j := slope{mat.NewDense(len(at), len(free), nil), make([]float64, len(free))}
	for column, k := range free {
		step := p.step
		if central {
			step *= 2
		}
		up, down := min(logs[k]+step, p.high[k]), logs[k]
		if central || up == down { // at its upper bound a constant can only go down
			down = max(logs[k]-step, p.low[k])
		}
		above, below := at, at
		var err error
		if up != logs[k] {
			if above, err = p.at(ctx, logs, k, up); err != nil {
				return j, err
			}
		}
		if down != logs[k] {
			if below, err = p.at(ctx, logs, k, down); err != nil {
				return j, err
			}
		}
		for i := range at {
			j.Set(i, column, (above[i]-below[i])/(up-down))
			if up != logs[k] && down != logs[k] {
				bend := weight(at[i]) * (above[i] - 2*at[i] + below[i]) / (up - down)
				// Equal jumps at the three points would give a third of this on average, so this estimate is on the
				// safe side.
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

// update corrects the slope by the effect of a step (Broyden, 1965), without further replays.
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

// at returns the residuals with one of the logs changed.
func (p problem) at(ctx context.Context, logs []float64, k int, value float64) ([]float64, error) {
	changed := slices.Clone(logs)
	changed[k] = value
	return p.residuals(ctx, changed)
}

// minimise moves the free logs to the least cost, by the method of Levenberg and Marquardt (Marquardt, 1963), and
// returns the residuals there. converged is false when maxSteps were too few. After an error logs are the best so far.
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
		if gain >= enough*max(cost(d.residuals), float64(len(residuals))) || d.age > 1 {
			continue
		}
		if d.central {
			return d.residuals, true, nil
		}
		d.central, d.age, d.damping = true, 0, 1e-2 // near the minimum the forward differences are too inexact
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

// step makes one step and returns the decrease of the cost; 0 when no step of any length decreases it.
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
		if d.age > 1 { // the old slope is more likely wrong than the damping
			d.age = 0
			continue
		}
		d.age = 1
		d.damping *= 10
	}
	d.age = 1
	return 0, nil
}

// moved returns the logs after a step of the free ones within the bounds, and the actual step.
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

// leastSquares returns the combination of the columns that is nearest to wanted, by a QR decomposition with the damping
// of each column as further rows.
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

// norm returns the length of a column.
func norm(j *mat.Dense, column int) float64 { return mat.Norm(j.ColView(column), 2) }
