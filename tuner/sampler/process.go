package sampler

import (
	"math"
	"slices"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas64"
	"gonum.org/v1/gonum/floats"
	"gonum.org/v1/gonum/lapack/lapack64"
	"gonum.org/v1/gonum/stat/distuv"
)

// A datum is what one trial says about the function at its point: its value there, or a bound of this value.
type datum struct {
	row      row
	value    float64
	err      float64 // standard error of the value, as its trial estimated it
	variance float64 // variance of the value's error, as the model believes it
	side     side

	compressed float64 // factor by which standardise made differences near the value smaller

	// For the model, a bound is like a value with an error. This value and its variance are the bound's site; fitBounds
	// finds the site.
	site, siteVariance float64
}

// A side says on which side of the value the function lies.
type side int

const (
	below side = -1 // the value is an upper bound
	exact side = 0
	above side = 1 // the value is a lower bound
)

// vagueVariance is the variance of the site of a bound that says nothing yet.
const vagueVariance = 1e4

// A process is a Gaussian process, conditioned on data.
type process struct {
	kernel kernel
	data   []datum
	common *covariances      // covariances of the data's errors; nil if the errors are independent
	factor blas64.Triangular // U of the covariance UᵀU of the data
	weight []float64         // inverse covariance × (values − mean)
	fit    float64           // ln of the likelihood, up to a constant
}

// condition returns the process after the data. For a bound it uses the current site. It calls LAPACK directly, because
// mat.Cholesky estimates a condition number too, which takes as long as the rest.
//
// The parameter common has the covariances of the data's errors; nil means that the errors are independent.
func condition(k kernel, data []datum, common *covariances) *process {
	p := &process{kernel: k, data: data, common: common}
	n := len(data)
	covariance, residual := make([]float64, n*n), make([]float64, n)
	for i := range data {
		for j := i; j < n; j++ {
			covariance[i*n+j] = k.covariance(data[i].row, data[j].row) + p.commonError(i, j)
		}
		value, variance := data[i].value, data[i].variance
		if data[i].side != exact {
			value, variance = data[i].site, data[i].siteVariance
		}
		covariance[i*n+i] += variance
		residual[i] = value - k.meanAt(data[i].row)
	}
	for jitter := 1e-9; !p.factorize(covariance) && jitter < 1; jitter *= 10 {
		for i := range n { // make the diagonal larger, because equal points with next to no error make the matrix singular
			covariance[i*n+i] += jitter * (k.signal + k.constant)
		}
	}
	p.weight = p.solve(residual)
	p.fit = -0.5 * floats.Dot(residual, p.weight)
	for i := range n {
		p.fit -= math.Log(p.factor.Data[i*n+i])
	}
	return p
}

// commonError returns the covariance of the errors of two values. It is 0 for one value, whose variance is in the datum,
// and for a bound, whose site has an error of its own.
func (p *process) commonError(i, j int) float64 {
	if p.common == nil || i == j || p.data[i].side != exact || p.data[j].side != exact {
		return 0
	}
	return p.common.at(i, j)
}

// factorize sets the factor of the process to U of a covariance UᵀU, and reports whether the covariance is positive
// definite. It takes the upper triangle of the covariance, row by row.
func (p *process) factorize(covariance []float64) (ok bool) {
	n := len(p.data)
	p.factor, ok = lapack64.Potrf(blas64.Symmetric{Uplo: blas.Upper, N: n, Stride: max(1, n), Data: slices.Clone(covariance)})
	return ok
}

// solve returns the inverse covariance of the data × v.
func (p *process) solve(v []float64) []float64 {
	x := blas64.Vector{N: len(v), Inc: 1, Data: slices.Clone(v)}
	blas64.Trsv(blas.Trans, p.factor, x)
	blas64.Trsv(blas.NoTrans, p.factor, x)
	return x.Data
}

// predict returns mean and variance of the function at the rows.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (p *process) predict(rows []row) (mean, variance []float64) {
	n, m := len(p.data), len(rows)
	mean, variance = make([]float64, m), make([]float64, m)
	if m == 0 {
		return mean, variance
	}
	cross := blas64.General{Rows: n, Cols: m, Stride: m, Data: make([]float64, n*m)}
	for j := range rows {
		mean[j], variance[j] = p.kernel.meanAt(rows[j]), p.kernel.covariance(rows[j], rows[j])
	}
	for i := range n {
		line := cross.Data[i*m : (i+1)*m]
		for j := range rows {
			line[j] = p.kernel.covariance(p.data[i].row, rows[j])
			mean[j] += line[j] * p.weight[i]
		}
	}
	blas64.Trsm(blas.Left, blas.Trans, 1, p.factor, cross)
	for i := range n {
		for j, v := range cross.Data[i*m : (i+1)*m] {
			variance[j] -= v * v
		}
	}
	for j := range variance {
		variance[j] = max(variance[j], 1e-12)
	}
	return mean, variance
}

// meanAt returns the mean of the function at one row.
func (p *process) meanAt(r row) float64 {
	mean := p.kernel.meanAt(r)
	for i := range p.data {
		mean += p.kernel.covariance(p.data[i].row, r) * p.weight[i]
	}
	return mean
}

// fitBounds returns the process after the data, with sites that fit the bounds. It changes the sites in the data. The
// method is expectation propagation (Rasmussen and Williams 2006, section 3.6). All sites are Gaussian factors and are
// updated in parallel. An upper bound has the likelihood Φ((bound − f)/error), and a lower bound has the mirror image
// of it.
func fitBounds(k kernel, data []datum, common *covariances, sweeps int) *process {
	p := condition(k, data, common)
	var bounded []int
	var rows []row
	for i := range data {
		if data[i].side != exact {
			bounded, rows = append(bounded, i), append(rows, data[i].row)
		}
	}
	for range sweeps {
		if len(bounded) == 0 {
			return p
		}
		moved := 0.0
		means, variances := p.predict(rows)
		for j, i := range bounded {
			moved = max(moved, data[i].update(means[j], variances[j]))
		}
		p = condition(k, data, common)
		if moved < 1e-3 {
			break
		}
	}
	return p
}

// update moves the site of a bound so that the mean and the variance of the function fit the bound's likelihood. It
// returns how far the mean moves, in standard deviations of the function.
func (d *datum) update(mean, variance float64) float64 {
	const damping = 0.7 // parallel updates overshoot where bounds are close to each other
	precision := 1/variance - 1/d.siteVariance
	if precision <= 1e-9 {
		return 0
	}
	v := 1 / precision // variance of the function without this bound
	m := v * (mean/variance - d.site/d.siteVariance)
	total := v + d.variance
	z := float64(d.side) * (m - d.value) / math.Sqrt(total)
	ratio := hazard(z)
	newMean := m + float64(d.side)*v*ratio/math.Sqrt(total)
	newVariance := v - v*v/total*ratio*(z+ratio)
	tau := 1/newVariance - precision
	if !(tau > 1/vagueVariance) || math.IsInf(tau, 0) || math.IsNaN(newMean) {
		tau = 1 / vagueVariance
	}
	nu := newMean*(precision+tau) - m*precision
	oldTau, oldNu := 1/d.siteVariance, d.site/d.siteVariance
	tau, nu = oldTau+damping*(tau-oldTau), oldNu+damping*(nu-oldNu)
	d.site, d.siteVariance = nu/tau, 1/tau
	return math.Abs(newMean-mean) / math.Sqrt(variance)
}

// hazard is φ(z)/Φ(z), for the standard normal distribution.
func hazard(z float64) float64 {
	if z < -20 {
		return -z - 1/z // Φ underflows; the error is below 1e-3 here
	}
	return distuv.UnitNormal.Prob(z) / distuv.UnitNormal.CDF(z)
}
