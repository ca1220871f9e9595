package capacity

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat/distuv"
)

// Evidence is what one probe says of each of its counted requests.
type Evidence struct {
	Rate float64 // offered, requests per second
	Draw int     // the number of its draw: the requests of two probes of one draw are the same
	Stretch
	Limits []LimitEvidence // the same limits in every probe of a search
}

// LimitEvidence says which of the counted requests broke a limit.
type LimitEvidence struct {
	Name    string
	Allowed float64 // share of the requests that may break it, in the long run: 0.01 of a p99
	Each    string  // one character a request: see slo.Check.Each
}

// The characters of LimitEvidence.Each that say something.
const (
	kept = '.'
	over = 'x'
)

// An estimate is where in the long run just as many requests break a limit as may.
type estimate struct {
	limit   string
	logRate float64 // ln of requests per second
	stdErr  float64 // of logRate
	bursts  float64 // how many there were near it
	pieces  []Piece // what it rests on

	fit      fit
	gradient [3]float64 // of logRate in the coefficients of the fit
}

// A Piece is by how much some requests in a row have moved a capacity. Two capacities that were measured with the same requests are
// moved alike by the bursts among them, and their difference is surer than each.
type Piece struct {
	Draw  int     `json:"draw"`  // of the probe
	Block int     `json:"block"` // of blockRequests
	Moved float64 `json:"moved"` // ln rate
}

// blockRequests are enough for the bursts that make requests slow together.
const blockRequests = 50

// estimateAll returns the boundary of each limit that can be told, over all probes.
func estimateAll(probes []*Evidence, p *Population) (all []estimate) {
	for limit := range probes[0].Limits {
		if e, ok := estimateOne(probes, limit, p); ok {
			all = append(all, e)
		}
	}
	return all
}

// estimateOne fits one limit. ok is false when too little broke it, or kept it, for a boundary.
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
	try(reaches())
	try(best.kernel.mixes())
	logRate, gradient, ok := best.boundary(p, allowed)
	// Again about the boundary, until it stays there: what is far from it says little of it.
	for moved, n := math.Inf(1), 0; ok && n < mostCenters && (n == 0 || moved > atRest); n++ {
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

// A boundary is looked for about itself until it moves by no more than atRest in ln rate, and mostCenters times at most.
const (
	mostCenters = 5
	atRest      = 0.02
)

// between is ln of a rate at which some requests break the limit and most keep it: where the share of those that do, rising with the rate,
// crosses twice what is allowed. ok is false when not even two requests broke it, or kept it.
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

// A share is how many requests broke a limit at a rate, or at some that are next to each other.
type share struct{ logRate, judged, broken float64 }

// over is ln of the share over another, by Jeffreys' estimate: none of a few is not the same as none of many.
func (s share) over(goal float64) float64 { return math.Log((s.broken + 0.5) / (s.judged + 1) / goal) }

// rising returns the shares in ascending order of their rates. Those that fall are put together with the ones before them, as in an
// isotonic regression.
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

// nearby is the distance in ln rate over which the weight of a probe falls to 1/e²: a straight line is a matter of the
// neighbourhood.
const nearby = 0.35

// nearness is the weight of a probe at a distance in ln rate: 1 where there is none.
func nearness(distance float64) float64 {
	d := distance / nearby
	return math.Exp(-2 * d * d)
}

// weight is what a request of the probe counts in a fit: the nearer the more, and the less the closer requests follow each
// other, because slow ones come together.
func (e *Evidence) weight(center float64) float64 {
	return nearness(math.Log(e.Rate)-center) / e.together()
}

// together is how many of the probe's requests tell as much as one that is independent of all others: slow ones come in clusters,
// the larger the faster requests follow each other, beyond what the load around them explains. The figures are those with which
// the standard errors of searches on simulated servers, with 1 to 25 requests per second, were as large as their errors.
func (e *Evidence) together() float64 { return max(9, 5.5*math.Sqrt(e.Rate)) }

// binWidth is how fine the load around requests is told apart, in ln.
const binWidth = 0.01

// observe returns the requests of all probes with the loads around them. center is ln of the rate about which the fit is wanted.
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
		slices.Sort(numbers) // so that sums do not depend on the map
		for _, number := range numbers {
			observed = append(observed, *bins[number])
		}
	}
	return observed
}

// modelError is how far z may be wrong at the boundary, however much is measured: the share of slow requests is no exact function
// of the load around them. On simulated servers it made the intervals of long measurements as wide as their errors.
const modelError = 0.16

// stdErrWith is the standard error with the information that a fit has, or would have.
func (e *estimate) stdErrWith(information [3][3]float64, bursts float64) float64 {
	variance := modelError * modelError / (e.fit.steepness() * e.fit.steepness())
	direction, _ := solve(information, e.gradient)
	for i := range direction {
		variance += direction[i] * e.gradient[i]
	}
	return math.Sqrt(variance) * student(knownBursts+bursts) / deviations
}

// bursts is how many times slow requests came together. Where they do not end they are no burst, but a server that carries no more:
// they count again and again.
func (e *Evidence) bursts(limit int) (n int) {
	quiet, slow := math.Inf(1), 0.0
	for _, c := range e.Limits[limit].Each {
		switch c {
		case kept:
			quiet++
		case over:
			slow++
			if quiet > apart*e.together() || slow > long*e.together() {
				n++
				slow = 1
			}
			quiet = 0
		}
	}
	return n
}

// knownBursts is how much the priors of a fit tell, as a number of bursts: with it the intervals of searches on simulated servers held
// what they were said to hold.
const knownBursts = 3

// apart is how many requests must be quick, in terms of together, until the next slow one is a burst of its own, and long how many
// slow ones make more than one.
const (
	apart = 2
	long  = 4
)

// student is the number of standard errors to both sides that hold 95 % of Student's distribution.
func student(freedom float64) float64 {
	return distuv.StudentsT{Sigma: 1, Nu: freedom}.Quantile(0.975)
}

// split fills in the pieces.
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

// expected is the information that one more probe of so many requests at a rate would bring.
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
