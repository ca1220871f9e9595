package capacity

import "math"

// A fit gives the probability Φ(z) that a request breaks a limit, with z = a + b·(ln rate − center + c·surplus). The
// surplus is ln of the load around the request divided by the rate of its probe. The fit uses the load that each
// request met, and not only the rate. Otherwise a window with many bursts would look like a slow server. The
// coefficient b is the steepness of the boundary. The coefficient c is the effect of a short load relative to a lasting
// load. A lasting load has more effect, because a queue grows under it for longer.
type fit struct {
	kernel
	shape        *shape
	center       float64       // ln of the rate around which the fit was made
	coefficients [3]float64    // a, ln b, ln c; the logarithms keep b and c positive, because no server gets faster under more load
	information  [3][3]float64 // inverse of the covariance matrix of the coefficients
	likelihood   float64       // ln of the likelihood times the prior
}

// An observation is a group of requests of one probe that met about the same load.
type observation struct {
	logRate, surplus float64
	requests, broken float64 // weighted numbers of requests; see Evidence.weight
}

// A shape is what is known about a fit before anything is measured: mean and standard deviation of a, ln b and ln c,
// and the kernels to try.
type shape struct {
	mean, spread [3]float64
	kernels      []kernel
	mixed        bool // whether to try the mixes of the best kernel too
}

// unknownShape is the shape of a fit if no fit to a similar server is known (see learned). Its figures come from fits
// to simulated servers.
var unknownShape = shape{
	mean: [3]float64{-1.5, math.Log(10), math.Log(0.9)}, spread: [3]float64{1.5, 0.6, 0.25},
	kernels: kernels(), mixed: true,
}

// serverSpread is the standard deviation of ln b and ln c between servers that run the same model on the same GPU
// (simulated H200).
var serverSpread = [3]float64{0, 0.25, 0.15}

// learned returns the shape for fits to other servers with the same model and GPU. It does not take over the
// coefficient a, because the level of one server tells nothing about the level of another.
func (f *fit) learned() shape {
	s := shape{mean: f.coefficients, spread: unknownShape.spread, kernels: []kernel{f.kernel}}
	s.mean[0] = unknownShape.mean[0]
	for i := 1; i < len(s.mean); i++ {
		unit := [3]float64{}
		unit[i] = 1
		column, _ := solve(f.information, unit)
		s.spread[i] = min(unknownShape.spread[i], math.Hypot(math.Sqrt(column[i]), serverSpread[i]))
	}
	return s
}

// fitTo finds the maximum of the likelihood by Newton's method with Fisher's information. In one step no coefficient
// changes by more than its standard deviation in the shape. The search begins at guess, such as the maximum with a
// similar kernel.
func fitTo(observed []observation, s *shape, k kernel, center float64, guess [3]float64) fit {
	f := fit{kernel: k, shape: s, center: center, coefficients: guess}
	for range 50 {
		gradient := f.score(observed)
		step, ok := solve(f.information, gradient)
		if !ok { // cannot happen: the information contains the prior
			break
		}
		size := 0.0
		for i := range step {
			size = max(size, math.Abs(step[i])/s.spread[i])
		}
		if size < 1e-4 {
			break
		}
		for i := range step {
			f.coefficients[i] += min(1, 1/size) * step[i]
		}
	}
	f.likelihood = f.likelihoodOf(observed)
	return f
}

// steepness returns b, the steepness of the boundary.
func (f *fit) steepness() float64 { return math.Exp(f.coefficients[1]) }

// transient returns b·c, the effect of a load that soon passes.
func (f *fit) transient() float64 { return math.Exp(f.coefficients[1] + f.coefficients[2]) }

// z returns the argument of Φ, and its derivatives with respect to a, ln b and ln c.
func (f *fit) z(o observation) (z float64, by [3]float64) {
	return f.zWith(o, f.steepness(), f.transient())
}

// zWith returns what the method z returns. It takes b as steep and b·c as transient, so that a loop computes each only
// once.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (f *fit) zWith(o observation, steep, transient float64) (z float64, by [3]float64) {
	by = [3]float64{1, steep*(o.logRate-f.center) + transient*o.surplus, transient * o.surplus}
	return f.coefficients[0] + by[1], by
}

// score sets the information of the fit, and returns the gradient of the likelihood.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (f *fit) score(observed []observation) (gradient [3]float64) {
	var information [3][3]float64
	steep, transient := f.steepness(), f.transient()
	for _, o := range observed {
		z, by := f.zWith(o, steep, transient)
		slope, tells := o.probit(z)
		for r := range by {
			gradient[r] += slope * by[r]
			for c := range r + 1 {
				information[r][c] += tells * by[r] * by[c]
			}
		}
	}
	for i := range gradient {
		spread := f.shape.spread[i]
		gradient[i] -= f.off(i) / spread
		information[i][i] += 1 / (spread * spread)
		for c := range i {
			information[c][i] = information[i][c]
		}
	}
	f.information = information
	return gradient
}

// off returns how far a coefficient is from its mean in the shape, in standard deviations.
func (f *fit) off(i int) float64 { return (f.coefficients[i] - f.shape.mean[i]) / f.shape.spread[i] }

// likelihoodOf returns ln of the likelihood of the observations times the prior.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (f *fit) likelihoodOf(observed []observation) (likelihood float64) {
	steep, transient := f.steepness(), f.transient()
	for _, o := range observed {
		z, _ := f.zWith(o, steep, transient)
		p := normal(bounded(z))
		likelihood += (o.requests - o.broken) * math.Log(1-p)
		if o.broken > 0 {
			likelihood += o.broken * math.Log(p)
		}
	}
	for i := range f.coefficients {
		likelihood -= f.off(i) * f.off(i) / 2
	}
	return likelihood
}

// probit returns the derivative of ln likelihood with respect to z, and the information about z.
//
// The race detector skips this function, which is several times slower with it and writes only data of its own goroutine.
//
//go:norace
func (o observation) probit(z float64) (slope, information float64) {
	z = bounded(z)
	d, p := density(z), normal(z)
	q, kept := 1-p, o.requests-o.broken
	return o.broken*d/p - kept*d/q, o.requests * d * d / (p * q)
}

// bounded limits z to ±6: for a greater |z| the difference 1-Φ(z) loses its digits, and from 8.3 on it is 0.
func bounded(z float64) float64 { return max(-6, min(6, z)) }

// normal is the cumulative distribution function of the standard normal distribution; density is its derivative.
func normal(z float64) float64  { return math.Erfc(-z/math.Sqrt2) / 2 }
func density(z float64) float64 { return math.Exp(-z*z/2) / math.Sqrt(2*math.Pi) }

// solve returns m⁻¹v for a symmetric positive definite matrix, by Gaussian elimination. If m is not positive definite,
// ok is false.
func solve(m [3][3]float64, v [3]float64) (x [3]float64, ok bool) {
	for i := range 3 {
		if !(m[i][i] > 0) {
			return x, false
		}
		for r := i + 1; r < 3; r++ {
			part := m[r][i] / m[i][i]
			for c := i; c < 3; c++ {
				m[r][c] -= part * m[i][c]
			}
			v[r] -= part * v[i]
		}
	}
	for i := 2; i >= 0; i-- {
		x[i] = v[i]
		for c := i + 1; c < 3; c++ {
			x[i] -= m[i][c] * x[c]
		}
		x[i] /= m[i][i]
	}
	return x, true
}
