package capacity

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"
)

// Evidence says for each counted request of one probe which limits the request broke.
type Evidence struct {
	Rate float64 // offered rate, requests per second
	Draw int     // number of the requests' draw; probes with the same draw send the same requests
	Stretch
	Limits []LimitEvidence // the same limits in every probe of a search

	known loads
}

// LimitEvidence says which counted requests broke one limit.
type LimitEvidence struct {
	Name     string
	Queue    bool    // the limit is on the time to first token, which grows with the queue
	Headroom float64 // ln(limit/value) of the whole probe; see slo.Check
	Allowed  float64 // share of the requests that may break the limit in the long run: 0.01 for a p99
	Each     string  // one character for each request: see slo.Check.Each
}

// count returns how many requests were judged, and how many of them broke the limit.
func (l LimitEvidence) count() (judged, broken float64) {
	for _, c := range l.Each {
		if c == kept || c == over {
			judged++
		}
		if c == over {
			broken++
		}
	}
	return judged, broken
}

// The characters of LimitEvidence.Each for requests whose outcome is known.
const (
	kept = '.'
	over = 'x'
)

// An estimate is the boundary of one limit: the rate at which the allowed share of requests breaks the limit in the
// long run.
type estimate struct {
	limit   string
	logRate float64 // ln of requests per second
	stdErr  float64 // standard error of logRate
	bursts  float64 // number of bursts of slow requests, each weighted by the nearness of its rate to the boundary
	near    float64 // number of probes, each weighted by the nearness of its rate to the boundary
	pieces  []Piece // the influence of each block of requests on the boundary

	fit      fit
	gradient [3]float64 // derivatives of logRate with respect to the coefficients of the fit
}

// A Piece is the influence of a block of consecutive requests on a capacity. A burst in the block influences all
// capacities that were measured with the same requests, and in the same direction. The ratio of two such capacities
// therefore has a smaller error than each capacity.
type Piece struct {
	Draw  int     `json:"draw"`  // number of the probe's draw
	Block int     `json:"block"` // number of the block; each block has blockRequests requests
	Moved float64 `json:"moved"` // influence of the block on the capacity, in ln rate
}

// blockRequests is the number of requests in a Piece. It is large enough to hold a burst of slow requests.
const blockRequests = 50

// locate estimates the boundary of each limit from the requests of all steps, and returns the lowest boundary. If a
// step has no evidence, or if too few requests were slow, ok is false.
func locate(steps []Step, p *Population, shapes []shape) (lowest estimate, ok bool) {
	var probes []*Evidence
	for _, step := range inTime(steps) {
		if step.Evidence == nil {
			return lowest, false
		}
		probes = append(probes, step.Evidence)
	}
	if len(probes) == 0 {
		return lowest, false
	}
	for limit := range probes[0].Limits {
		s := &unknownShape
		if limit < len(shapes) {
			s = &shapes[limit]
		}
		if e, found := estimateOne(probes, limit, p, s); found && (!ok || e.logRate < lowest.logRate) {
			lowest, ok = e, true
		}
	}
	return lowest, ok
}

// estimateOne estimates the boundary of one limit. If too few requests broke the limit, if too few kept it, or if the
// boundary is too far from the probes, ok is false.
func estimateOne(probes []*Evidence, limit int, p *Population, s *shape) (e estimate, ok bool) {
	center, ok := crossing(probes, limit)
	if !ok {
		return e, false
	}
	allowed := probes[0].Limits[limit].Allowed
	best, at := fit{likelihood: math.Inf(-1)}, s.mean
	try := func(kernels []kernel) {
		for _, k := range kernels {
			f := fitTo(observe(probes, limit, k, center), s, k, center, at)
			if at = f.coefficients; f.likelihood > best.likelihood {
				best = f
			}
		}
	}
	try(s.kernels)
	if s.mixed {
		try(best.kernel.mixes())
	}
	logRate, gradient, ok := best.boundary(p, allowed)
	// Fit again around the boundary until the boundary no longer moves, because far probes say little about it.
	for moved, n := math.Inf(1), 0; ok && n < maxCenters && (n == 0 || moved > settledCenter); n++ {
		best = fitTo(observe(probes, limit, best.kernel, logRate), s, best.kernel, logRate, best.coefficients)
		was := logRate
		logRate, gradient, ok = best.boundary(p, allowed)
		moved = math.Abs(logRate - was)
	}
	if !ok {
		return e, false
	}
	e = estimate{limit: probes[0].Limits[limit].Name, logRate: logRate, fit: best, gradient: gradient}
	for _, probe := range probes {
		near := nearness(math.Log(probe.Rate) - e.logRate)
		e.near += near
		e.bursts += near * float64(probe.bursts(limit))
	}
	e.split(probes, limit)
	e.stdErr = e.stdErrWith(best.information, e.bursts, e.near)
	return e, true
}

// estimateOne repeats the fit around the boundary it found, at most maxCenters times. It stops when the boundary moves
// by no more than settledCenter in ln rate.
const (
	maxCenters    = 5
	settledCenter = 0.02
)

// crossing returns ln of the rate at which the share of requests that break the limit crosses twice the allowed share.
// The first fit is made around this rate, because some requests break the limit there and most keep it. If fewer than
// two requests broke the limit, or fewer than two kept it, ok is false.
func crossing(probes []*Evidence, limit int) (center float64, ok bool) {
	goal := 2 * probes[0].Limits[limit].Allowed
	shares := risingShares(probes, limit)
	kept, broken := 0.0, 0.0
	var below, above *share
	for i := range shares {
		s := &shares[i]
		kept += s.judged - s.broken
		broken += s.broken
		switch {
		case s.broken <= goal*s.judged:
			below = s
		case above == nil:
			above = s
		}
	}
	ok = min(kept, broken) >= 2
	switch {
	case len(shares) == 0:
		return 0, false
	case above == nil:
		return below.logRate, ok
	case below == nil:
		return above.logRate, ok
	}
	low, high := min(0, below.logRatio(goal)), max(0, above.logRatio(goal))
	if low == high {
		return (below.logRate + above.logRate) / 2, ok
	}
	return below.logRate + low/(low-high)*(above.logRate-below.logRate), ok
}

// A share counts the requests that were judged and those that broke a limit, at one rate or at several neighbouring
// rates.
type share struct{ logRate, judged, broken float64 }

// logRatio returns ln(share/goal). It uses Jeffreys' estimate of the share, which distinguishes 0 of 5 requests from 0
// of 500.
func (s share) logRatio(goal float64) float64 {
	return math.Log((s.broken + 0.5) / (s.judged + 1) / goal)
}

// risingShares returns the shares of all probes in ascending order of their rates. If a share is lower than the share
// before it, the two are merged, as in an isotonic regression.
func risingShares(probes []*Evidence, limit int) (shares []share) {
	sorted := slices.SortedStableFunc(slices.Values(probes), func(a, b *Evidence) int { return cmp.Compare(a.Rate, b.Rate) })
	for _, e := range sorted {
		s := share{logRate: math.Log(e.Rate)}
		s.judged, s.broken = e.Limits[limit].count()
		if s.judged == 0 {
			continue
		}
		for len(shares) > 0 {
			last := shares[len(shares)-1]
			if last.broken*s.judged <= s.broken*last.judged {
				break
			}
			n := last.judged + s.judged
			s = share{(last.logRate*last.judged + s.logRate*s.judged) / n, n, last.broken + s.broken}
			shares = shares[:len(shares)-1]
		}
		shares = append(shares, s)
	}
	return shares
}

// nearDistance is the distance in ln rate over which the weight of a probe falls to 1/e². Far probes weigh less,
// because the straight line of a fit holds only near the boundary.
const nearDistance = 0.35

// nearness is the weight of a probe at a distance in ln rate; 1 at a distance of 0.
func nearness(distance float64) float64 {
	d := distance / nearDistance
	return math.Exp(-2 * d * d)
}

// weight is the weight of each request of the probe in a fit around a center (ln rate). A probe near the center weighs
// more. A request weighs less than an independent one, because slow requests come in clusters.
func (e *Evidence) weight(center float64) float64 {
	return nearness(math.Log(e.Rate)-center) / e.clusterSize()
}

// clusterSize is the number of requests that together tell as much as one independent request: slow requests come in
// clusters. Clusters are larger at higher rates, and the load around a request explains only part of that. At 1 to 25
// requests per second, these figures made the stated errors of searches on simulated servers as large as the true
// errors.
func (e *Evidence) clusterSize() float64 { return max(9, 5.5*math.Sqrt(e.Rate)) }

// minWeight is the weight of a probe that is too far from the center to change a fit.
const minWeight = 1e-12

// observe returns the requests of all probes, binned by the load around them. The fit is made around center (ln rate).
func observe(probes []*Evidence, limit int, k kernel, center float64) []observation {
	var observed []observation
	for _, e := range probes {
		weight, logRate := e.weight(center), math.Log(e.Rate)
		if weight < minWeight {
			continue
		}
		for _, bin := range e.groups(k, limit) {
			observed = append(observed, observation{logRate, bin.surplus, weight * bin.judged, weight * bin.broken})
		}
	}
	return observed
}

// These constants make the stated errors of one server's capacity as large as its true errors, on simulated servers.
const (
	// modelError is a standard error of ln rate that more requests do not reduce, because the share of slow requests does
	// not depend on the load around them alone.
	modelError = 0.015
	// probeError is the standard deviation of ln rate from probe to probe that neither the fit nor the pieces show. For
	// example, some probes have no burst at all. It counts at least minNear probes as near: the fit's own variance says how
	// far an extrapolation may be wrong.
	probeError = 0.028
	minNear    = 0.3
	// pieceFactor is the standard error of ln rate, divided by the root of the pieces' sum of squares. It is above 1
	// because a burst may cover several pieces.
	pieceFactor = 2
	// maxClustered limits the variance that the pieces show, as a multiple of the fit's variance. On simulated servers the
	// multiple is 0.4 to 3. It is far higher only if few requests do not fit at all.
	maxClustered = 4
)

// stdErrWith returns the standard error that the estimate would have with this information, and with these numbers of
// bursts and of near probes. The information counts a cluster of requests as one independent request. The pieces show
// how the slow requests are really spread. Both are rough, so their mean is taken.
func (e *estimate) stdErrWith(information [3][3]float64, bursts, near float64) float64 {
	spread := 0.0
	for _, p := range e.pieces {
		spread += p.Moved * p.Moved
	}
	clustered := min(maxClustered, pieceFactor*pieceFactor*spread/e.varianceOf(e.fit.information))
	variance := e.varianceOf(information)*(1+clustered)/2 + probeError*probeError/max(minNear, near) + modelError*modelError
	return math.Sqrt(variance) * student(knownBursts+bursts) / deviations
}

// varianceOf returns the variance of logRate if the coefficients of the fit had this information.
func (e *estimate) varianceOf(information [3][3]float64) (variance float64) {
	direction, _ := solve(information, e.gradient)
	for i := range direction {
		variance += direction[i] * e.gradient[i]
	}
	return variance
}

// bursts counts the bursts of slow requests. A long run of slow requests is no single burst: it shows that the server
// is overloaded. Each part of such a run counts as a burst.
func (e *Evidence) bursts(limit int) (n int) {
	quiet, slow := math.Inf(1), 0.0
	for _, c := range e.Limits[limit].Each {
		switch c {
		case kept:
			quiet++
		case over:
			slow++
			if quiet > burstGap*e.clusterSize() || slow > burstLength*e.clusterSize() {
				n++
				slow = 1
			}
			quiet = 0
		}
	}
	return n
}

// knownBursts says how many bursts the prior knowledge in a fit is worth. With this figure the intervals of searches on
// simulated servers held the true capacity as often as they should.
const knownBursts = 6

// The constants burstGap and burstLength are in units of clusterSize. A slow request begins a new burst if more than
// burstGap·clusterSize quick requests precede it. It also begins one if the present burst has reached
// burstLength·clusterSize slow requests.
const (
	burstGap    = 2
	burstLength = 4
)

// student returns how many standard errors on each side of the mean hold 95 % of Student's t distribution.
func student(freedom float64) float64 {
	return distuv.StudentsT{Sigma: 1, Nu: freedom}.Quantile(0.975)
}

// split computes how much each block of requests moved the estimate.
func (e *estimate) split(probes []*Evidence, limit int) {
	direction, _ := solve(e.fit.information, e.gradient)
	for _, probe := range probes {
		weight := probe.weight(e.fit.center)
		for i, surplus := range probe.around(e.fit.kernel) {
			if i%blockRequests == 0 {
				e.pieces = append(e.pieces, Piece{Draw: probe.Draw, Block: i / blockRequests})
			}
			o := observation{logRate: math.Log(probe.Rate), surplus: surplus, requests: weight}
			switch probe.Limits[limit].Each[i] {
			case over:
				o.broken = weight
			case kept:
			default:
				continue
			}
			z, by := e.fit.z(o)
			slope, _ := o.probit(z)
			e.pieces[len(e.pieces)-1].Moved += slope * (direction[0]*by[0] + direction[1]*by[1] + direction[2]*by[2])
		}
	}
}

// expected returns the information that one more probe with this many requests would bring.
func (e *estimate) expected(load fluctuation, logRate, requests float64) (information [3][3]float64) {
	probe := Evidence{Rate: math.Exp(logRate)}
	weight := requests * probe.weight(e.logRate)
	for _, bin := range load {
		o := observation{logRate: logRate, surplus: bin.surplus, requests: weight * bin.share}
		z, by := e.fit.z(o)
		_, tells := o.probit(z)
		for r := range by {
			for c := range by {
				information[r][c] += tells * by[r] * by[c]
			}
		}
	}
	return information
}
