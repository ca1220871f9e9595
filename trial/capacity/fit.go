package capacity

import "math"

// A fit gives the probability Φ(z) that a request breaks a limit, with z = a + b·(ln rate − center + c·surplus). The
// surplus is ln of the load around the request divided by the rate of its probe. The regression is on the load that
// each request met, and not on the rate alone, so that a window with many bursts does not look like a slow server. b is
// the steepness of the boundary. c is the effect of a passing load, as a part of the effect of a lasting load, which a
// queue remembers for longer.
type fit struct {
	kernel
	center      float64       // ln of the rate about which the fit was made
	at          [3]float64    // a, ln b, ln c; logarithms, because no server gets faster with the load
	information [3][3]float64 // its inverse is the variance of at
	likelihood  float64       // ln of the likelihood times the prior
}

// An observation is a group of requests of one probe that met about the same load.
type observation struct {
	logRate, surplus float64
	requests, broken float64 // weighed
}

// The mean and the standard deviation of a, ln b and ln c before anything is measured, from fits to simulated servers.
var (
	priorAt     = [3]float64{-1.5, math.Log(10), math.Log(0.9)}
	priorSpread = [3]float64{1.5, 0.6, 0.25}
)

// fitTo finds the maximum of the likelihood by Newton's method with Fisher's information, in steps of at most a prior's
// spread. It begins at from, such as the maximum with a similar kernel.
func fitTo(observed []observation, k kernel, center float64, from [3]float64) fit {
	f := fit{kernel: k, center: center, at: from}
	for range 50 {
		gradient := f.score(observed)
		step, ok := solve(f.information, gradient)
		if !ok { // cannot happen: the information contains the prior
			return f
		}
		size := 0.0
		for i := range step {
			size = max(size, math.Abs(step[i])/priorSpread[i])
		}
		if size < 1e-4 {
			break
		}
		for i := range step {
			f.at[i] += min(1, 1/size) * step[i]
		}
	}
	return f
}

// steepness is b.
func (f *fit) steepness() float64 { return math.Exp(f.at[1]) }

// passing is b·c.
func (f *fit) passing() float64 { return math.Exp(f.at[1] + f.at[2]) }

// z returns the argument of Φ, and its gradient by a, ln b and ln c.
func (f *fit) z(o observation) (z float64, by [3]float64) {
	return f.zWith(o, f.steepness(), f.passing())
}

// zWith is z for loops over observations: steep is b, and passing is b·c.
func (f *fit) zWith(o observation, steep, passing float64) (z float64, by [3]float64) {
	by = [3]float64{1, steep*(o.logRate-f.center) + passing*o.surplus, passing * o.surplus}
	return f.at[0] + by[1], by
}

// score computes the information and the likelihood, and returns the gradient.
func (f *fit) score(observed []observation) (gradient [3]float64) {
	var information [3][3]float64
	likelihood := 0.0
	steep, passing := f.steepness(), f.passing()
	for _, o := range observed {
		z, by := f.zWith(o, steep, passing)
		slope, tells, ln := o.probit(z)
		for r := range by {
			gradient[r] += slope * by[r]
			for c := range r + 1 {
				information[r][c] += tells * by[r] * by[c]
			}
		}
		likelihood += ln
	}
	for i := range gradient {
		off := (f.at[i] - priorAt[i]) / priorSpread[i]
		gradient[i] -= off / priorSpread[i]
		information[i][i] += 1 / (priorSpread[i] * priorSpread[i])
		likelihood -= off * off / 2
		for c := range i {
			information[c][i] = information[i][c]
		}
	}
	f.information, f.likelihood = information, likelihood
	return gradient
}

// probit returns the derivative of the ln likelihood by z, the information about z, and the ln likelihood.
func (o observation) probit(z float64) (slope, information, likelihood float64) {
	z = max(-6, min(6, z)) // beyond that a float64 rounds the probability to 0 or 1
	d, p := density(z), normal(z)
	q, kept := 1-p, o.requests-o.broken
	return o.broken*d/p - kept*d/q, o.requests * d * d / (p * q), o.broken*math.Log(p) + kept*math.Log(q)
}

// normal is the distribution function of the normal distribution, and density its derivative.
func normal(z float64) float64  { return math.Erfc(-z/math.Sqrt2) / 2 }
func density(z float64) float64 { return math.Exp(-z*z/2) / math.Sqrt(2*math.Pi) }

// solve returns m⁻¹v of a symmetric positive matrix, by elimination.
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
