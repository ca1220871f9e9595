package capacity

import (
	"fmt"
	"math"
)

// A Race is a search that compares a server with the best one so far. It measures no more than the comparison needs: a
// server that is clearly worse gets an estimate, and only a server that may be better gets an exact capacity.
type Race struct {
	Best    Capacity // to be beaten; a Race without a rate is none
	MinGain float64  // ln; the race is lost once the gain that may be expected of the server is below this
}

const (
	// raceAbove is the first rate of a race, as a part of the best capacity. Just above the boundary the slow requests of
	// an equal server are many enough to be counted, and few enough to show where the boundary is.
	raceAbove = 1.05
	// maxDescent is the factor by which a race goes down after a fail. An estimate from far above the boundary is an
	// extrapolation, and a rate that is far too low takes a long window to pass.
	maxDescent = 1.3
	// maxLost fails of which no request tells a boundary end a race.
	maxLost = 2
	// enoughForLoser probes of a server that still seems worse end its race: another server promises more. A server that
	// seems better gets up to enoughForWinner, and fewer if the standard error of its gain is down to raceStdErr.
	enoughForLoser  = 2
	enoughForWinner = 4
	raceStdErr      = 0.03
	// raceUp is the factor by which a race goes up after a pass in which hardly any request was slow.
	raceUp = 1.2
	// minRaceStdErr is the smallest error of a comparison. Errors that two servers share cancel, but not all of them.
	minRaceStdErr = 0.02
)

// on reports whether there is something to beat.
func (r Race) on() bool { return r.Best.Carried() > 0 }

// expectedGain is the mean of a gain over the outcomes above 0, counting the others as 0. It is the expected improvement
// of Bayesian optimization (Jones et al. 1998) for one server.
func expectedGain(gain, stdErr float64) float64 {
	u := gain / stdErr
	return stdErr * (density(u) + u*normal(u))
}

// gain returns ln(rate / best) and its standard error.
func (r Race) gain(e *estimate) (gain, stdErr float64) {
	is := Capacity{Rate: math.Exp(e.logRate), Bound: Exact, StdErr: e.stdErr, Pieces: e.pieces}
	best := r.Best
	best.Bound, best.Rate = Exact, best.Carried()
	gain = e.logRate - math.Log(best.Rate)
	if c, ok := Compare(is, best); ok {
		return gain, max(minRaceStdErr, c.stdErr)
	}
	return gain, max(minRaceStdErr, e.stdErr)
}

// nextOfRace returns the next rate of a race, or why it is over, and whether it is lost.
func (l *searchState) nextOfRace() (rate float64, why string, lost bool) {
	best := l.Race.Best.Carried()
	e, ok := l.estimate()
	if !ok {
		if l.low == nil && len(l.steps) >= maxLost {
			return 0, fmt.Sprintf("lost the race: it failed at %.4g req/s; the best carries %.4g", l.high.Rate, best), true
		}
		rate, why = l.nextBlind()
		return rate, why, false
	}
	gain, stdErr := l.Race.gain(&e)
	if l.high != nil && (expectedGain(gain, stdErr) < l.Race.MinGain || gain <= 0 && len(l.steps) >= enoughForLoser) {
		return 0, fmt.Sprintf("lost the race: it carries about %.4g req/s, ±%.0f %%; the best carries %.4g",
			math.Exp(e.logRate), 100*halfWidth(e.stdErr), best), true
	}
	rate, why = l.nextNear(&e, stdErr)
	return rate, why, false
}

// nextBlind returns the next rate of a race where the requests show no boundary: hardly any was slow, or hardly any was
// quick.
func (l *searchState) nextBlind() (rate float64, why string) {
	switch {
	case l.high == nil:
		return l.upward(l.low.Rate * raceUp)
	case l.low == nil:
		return l.downward(l.high.Rate / maxDescent)
	}
	return l.narrow()
}

// nextNear returns a rate near the boundary that the requests show. It brackets the boundary, and goes on until the error
// is small.
func (l *searchState) nextNear(e *estimate, stdErr float64) (rate float64, why string) {
	at := math.Exp(e.logRate)
	switch {
	case l.high == nil:
		return l.upward(min(max(at, l.low.Rate*raceAbove), l.low.Rate*maxDescent))
	case l.low == nil:
		return l.downward(max(min(at, l.high.Rate/raceAbove), l.high.Rate/maxDescent))
	case l.high.Rate/l.low.Rate-1 > l.Tolerance+1e-9:
		return l.narrow()
	case stdErr > raceStdErr && len(l.steps) < enoughForWinner:
		return l.round(at * sharpenAt[len(l.steps)%len(sharpenAt)]), ""
	}
	return 0, l.precision()
}

// upward and downward return a rate that was not probed yet, or why there is none.
func (l *searchState) upward(rate float64) (float64, string) {
	if l.low.Rate >= l.Max {
		return 0, fmt.Sprintf("passed at the highest rate, %.4g req/s", l.Max)
	}
	return l.round(rate), ""
}

func (l *searchState) downward(rate float64) (float64, string) {
	if l.high.Rate <= l.Min {
		return 0, fmt.Sprintf("failed at the lowest rate, %.4g req/s", l.Min)
	}
	return l.round(rate), ""
}
