package capacity

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"
)

// Evidence says for each counted request of one probe which limits the request broke.
type Evidence struct {
	Rate float64 // offered, requests per second
	Draw int     // two probes of the same draw have the same requests
	Stretch
	Limits []LimitEvidence // the same limits in every probe of a search
}

// LimitEvidence says which counted requests broke one limit.
type LimitEvidence struct {
	Name    string
	Allowed float64 // share of the requests that may break the limit in the long run: 0.01 for a p99
	Each    string  // one character for each request: see slo.Check.Each
}

// The characters of LimitEvidence.Each for requests whose outcome is known.
const (
	kept = '.'
	over = 'x'
)

// An estimate is the boundary of one limit: the rate at which the allowed share of requests breaks the limit in the long
// run.
type estimate struct {
	limit   string
	logRate float64 // ln of requests per second
	stdErr  float64 // standard error of logRate
	bursts  float64 // number of bursts of slow requests at rates near the boundary; see nearness
	pieces  []Piece // how far each block of requests has moved the boundary

	fit      fit
	gradient [3]float64 // derivatives of logRate by the coefficients of the fit
}

// A Piece says how far some requests in a row have moved a capacity. A burst moves all capacities that were measured with
// its requests, and moves them alike. Their ratio therefore has a smaller error than each capacity.
type Piece struct {
	Draw  int     `json:"draw"`  // of the probe
	Block int     `json:"block"` // number of the block of blockRequests
	Moved float64 `json:"moved"` // in ln rate
}

// blockRequests is long enough to hold a burst of slow requests.
const blockRequests = 50

// locate estimates the boundary of each limit from the requests of all steps, and returns the lowest. ok is false if a
// step does not say what each request did, and if too few requests were slow.
func locate(steps []Step, p *Population) (lowest estimate, ok bool) {
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
		if e, found := estimateOne(probes, limit, p); found && (!ok || e.logRate < lowest.logRate) {
			lowest, ok = e, true
		}
	}
	return lowest, ok
}

// estimateOne fits one limit. ok is false when too few requests broke it, or kept it.
func estimateOne(probes []*Evidence, limit int, p *Population) (e estimate, ok bool) {
	center, ok := between(probes, limit)
	if !ok {
		return e, false
	}
	allowed := probes[0].Limits[limit].Allowed
	best, at := fit{likelihood: math.Inf(-1)}, priorAt
	try := func(kernels []kernel) {
		for _, k := range kernels {
			f := fitTo(observe(probes, limit, k, center), k, center, at)
			if at = f.at; f.likelihood > best.likelihood {
				best = f
			}
		}
	}
	try(kernels())
	try(best.kernel.mixes())
	logRate, gradient, ok := best.boundary(p, allowed)
	// Fit again around the boundary until the boundary no longer moves, because far probes say little about it.
	for moved, n := math.Inf(1), 0; ok && n < maxCenters && (n == 0 || moved > settledCenter); n++ {
		best = fitTo(observe(probes, limit, best.kernel, logRate), best.kernel, logRate, best.at)
		was := logRate
		logRate, gradient, ok = best.boundary(p, allowed)
		moved = math.Abs(logRate - was)
	}
	if !ok {
		return e, false
	}
	e = estimate{limit: probes[0].Limits[limit].Name, logRate: logRate, fit: best, gradient: gradient}
	for _, probe := range probes {
		e.bursts += nearness(math.Log(probe.Rate)-e.logRate) * float64(probe.bursts(limit))
	}
	e.stdErr = e.stdErrWith(best.information, e.bursts)
	e.split(probes, limit)
	return e, true
}

// A fit is repeated about its own boundary until that moves by no more than settledCenter in ln rate, at most
// maxCenters times.
const (
	maxCenters    = 5
	settledCenter = 0.02
)

// between returns ln of the rate at which the share of requests that break the limit crosses twice the allowed share. At
// that rate some requests break the limit and most keep it, so the first fit is made about it. ok is false when fewer
// than two requests broke the limit, or fewer than two kept it.
func between(probes []*Evidence, limit int) (center float64, ok bool) {
	goal := 2 * probes[0].Limits[limit].Allowed
	shares := rising(probes, limit)
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
	low, high := min(0, below.over(goal)), max(0, above.over(goal))
	if low == high {
		return (below.logRate + above.logRate) / 2, ok
	}
	return below.logRate + low/(low-high)*(above.logRate-below.logRate), ok
}

// A share counts the requests that were judged, and those that broke a limit, at one rate or at some neighbouring rates.
type share struct{ logRate, judged, broken float64 }

// over returns ln(share/goal). It uses Jeffreys' estimate of the share, which distinguishes 0 of 5 requests from 0 of
// 500.
func (s share) over(goal float64) float64 { return math.Log((s.broken + 0.5) / (s.judged + 1) / goal) }

// rising returns the shares of all probes in ascending order of their rates. A share that is lower than the one before
// is merged with it, as in an isotonic regression.
func rising(probes []*Evidence, limit int) (shares []share) {
	sorted := slices.SortedStableFunc(slices.Values(probes), func(a, b *Evidence) int { return cmp.Compare(a.Rate, b.Rate) })
	for _, e := range sorted {
		s := share{logRate: math.Log(e.Rate)}
		for _, c := range e.Limits[limit].Each {
			if c == kept || c == over {
				s.judged++
			}
			if c == over {
				s.broken++
			}
		}
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

// nearby is the distance in ln rate over which the weight of a probe falls to 1/e². A fit is a straight line, which holds
// only near the boundary.
const nearby = 0.35

// nearness is the weight of a probe at a distance in ln rate; 1 at a distance of 0.
func nearness(distance float64) float64 {
	d := distance / nearby
	return math.Exp(-2 * d * d)
}

// weight is the weight of each request of the probe in a fit about a center (ln rate). A probe near the center weighs
// more. A request weighs less than an independent one, because slow requests come in clusters.
func (e *Evidence) weight(center float64) float64 {
	return nearness(math.Log(e.Rate)-center) / e.clusterSize()
}

// clusterSize is the number of requests that tell as much as one independent request. Slow requests come in clusters,
// and clusters grow with the rate, beyond what the load around a request explains. With these figures the stated
// errors of searches on simulated servers were as large as the true errors, at 1 to 25 requests per second.
func (e *Evidence) clusterSize() float64 { return max(9, 5.5*math.Sqrt(e.Rate)) }

// binWidth is the width of the bins for the load around requests, in ln(load/rate).
const binWidth = 0.01

// observe returns the requests of all probes, binned by the load around them. center is ln of the rate about which the
// fit is made.
func observe(probes []*Evidence, limit int, k kernel, center float64) []observation {
	var observed []observation
	for _, e := range probes {
		bins := make(map[int]*observation)
		weight := e.weight(center)
		for i, surplus := range e.surplus(k, e.Rate) {
			c := e.Limits[limit].Each[i]
			if c != kept && c != over {
				continue
			}
			number := int(math.Round(surplus / binWidth))
			bin := bins[number]
			if bin == nil {
				bin = &observation{logRate: math.Log(e.Rate), surplus: float64(number) * binWidth}
				bins[number] = bin
			}
			bin.requests += weight
			if c == over {
				bin.broken += weight
			}
		}
		numbers := make([]int, 0, len(bins))
		for number := range bins {
			numbers = append(numbers, number)
		}
		slices.Sort(numbers) // the order of a map would change the sums
		for _, number := range numbers {
			observed = append(observed, *bins[number])
		}
	}
	return observed
}

// modelError is the standard error of a fit's z at the boundary that no number of requests reduces, because the share of
// slow requests is no exact function of the load around them. With this figure the intervals of long measurements on
// simulated servers were as wide as their errors.
const modelError = 0.16

// stdErrWith is the standard error of an estimate with this information and this number of bursts.
func (e *estimate) stdErrWith(information [3][3]float64, bursts float64) float64 {
	variance := modelError * modelError / (e.fit.steepness() * e.fit.steepness())
	direction, _ := solve(information, e.gradient)
	for i := range direction {
		variance += direction[i] * e.gradient[i]
	}
	return math.Sqrt(variance) * student(knownBursts+bursts) / deviations
}

// bursts counts the bursts of slow requests. A long run of slow requests is no single burst, because the server carries
// no more: each further part of the run counts as a burst.
func (e *Evidence) bursts(limit int) (n int) {
	quiet, slow := math.Inf(1), 0.0
	for _, c := range e.Limits[limit].Each {
		switch c {
		case kept:
			quiet++
		case over:
			slow++
			if quiet > apart*e.clusterSize() || slow > long*e.clusterSize() {
				n++
				slow = 1
			}
			quiet = 0
		}
	}
	return n
}

// knownBursts is the number of bursts that the priors of a fit are worth. With this figure the intervals of searches on
// simulated servers held the truth as often as they should.
const knownBursts = 3

// apart and long are in units of clusterSize. A slow request begins a new burst after apart quick ones, and in a run of
// more than long slow ones.
const (
	apart = 2
	long  = 4
)

// student returns the number of standard errors to each side that hold 95 % of Student's distribution.
func student(freedom float64) float64 {
	return distuv.StudentsT{Sigma: 1, Nu: freedom}.Quantile(0.975)
}

// split computes the pieces of the estimate.
func (e *estimate) split(probes []*Evidence, limit int) {
	direction, _ := solve(e.fit.information, e.gradient)
	for _, probe := range probes {
		weight := probe.weight(e.fit.center)
		for i, surplus := range probe.surplus(e.fit.kernel, probe.Rate) {
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
			slope, _, _ := o.probit(z)
			e.pieces[len(e.pieces)-1].Moved += slope * (direction[0]*by[0] + direction[1]*by[1] + direction[2]*by[2])
		}
	}
}

// expected returns the information that one more probe with so many requests would bring.
func (e *estimate) expected(load fluctuation, logRate, requests float64) (information [3][3]float64) {
	probe := Evidence{Rate: math.Exp(logRate)}
	weight := requests * probe.weight(e.logRate)
	for _, bin := range load {
		o := observation{logRate: logRate, surplus: bin.surplus, requests: weight * bin.part}
		z, by := e.fit.z(o)
		_, tells, _ := o.probit(z)
		for r := range by {
			for c := range by {
				information[r][c] += tells * by[r] * by[c]
			}
		}
	}
	return information
}
