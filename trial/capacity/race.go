package capacity

import (
	"fmt"
	"math"
	"slices"

	"vllmtuner/render"
)

// A Race is a search that compares a server with the best one so far. It measures no more than the comparison needs: a
// server that is clearly worse gets an estimate, and only a server that may be better gets an exact capacity.
type Race struct {
	Best    Capacity // to be beaten; a Race without a rate is none
	Steps   []Step   // the steps of Best with their evidence; without them nothing is known of the shape of a fit
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
	enoughForWinner = 3
	raceStdErr      = 0.03
	// raceUp is the factor by which a race goes up at least after a pass.
	raceUp = 1.1
	// raceOver is where a race looks for the failing end of a bracket, as a part of the estimated rate.
	raceOver = 1.06
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

// shapes returns what the steps of the best server show of the shape of a fit, by limit.
func (r Race) shapes(p *Population) (all []shape) {
	probes := evidenceOf(r.Steps)
	if len(probes) == 0 || !r.on() {
		return nil
	}
	for limit := range probes[0].Limits {
		s := unknownShape
		if e, ok := estimateOne(probes, limit, p, &unknownShape); ok {
			s = e.fit.learned()
		}
		all = append(all, s)
	}
	return all
}

// gain returns ln(rate / best) and its standard error; ok is false when nothing tells. If it can, it compares the two
// servers by the requests that both had: some draws are harder than others, and a server that met only a hard one is not
// worse for it.
func (l *searchState) gain() (gain, stdErr float64, ok bool) {
	if gain, stdErr, ok = l.pairedGain(); ok {
		return believed(gain, stdErr), stdErr, true
	}
	best := l.Race.Best
	if l.low != nil && l.high != nil && l.high.Rate > l.low.Rate { // a bracket is surer than a regression over few requests
		middle := math.Log(l.low.Rate*l.high.Rate) / 2
		stdErr = math.Sqrt(l.bracketVariance(l.low.Rate, l.high.Rate) + best.StdErr*best.StdErr)
		return believed(middle-math.Log(best.Carried()), stdErr), stdErr, true
	}
	e, ok := l.estimate()
	if !ok || !l.isNear(e.logRate) {
		return 0, 0, false
	}
	stdErr = max(minRaceStdErr, e.stdErr)
	return believed(e.logRate-math.Log(best.Carried()), stdErr), stdErr, true
}

// isNear reports whether a step was near a rate. An estimate far from all steps is an extrapolation.
func (l *searchState) isNear(logRate float64) bool {
	return slices.ContainsFunc(l.steps, func(s Step) bool { return math.Abs(math.Log(s.Rate)-logRate) <= math.Log(maxDescent) })
}

// pairedGain compares two servers by their headroom under the same draws, and by their brackets. One probe of each tells
// their ratio to within 4 % (standard deviation, simulated H200), where single capacities differ by 8 % from draw to draw.
func (l *searchState) pairedGain() (gain, stdErr float64, ok bool) {
	best := l.Race.Best
	sum, weights := 0.0, 0.0
	tell := func(gain, variance float64) {
		sum += gain / variance
		weights += 1 / variance
	}
	for _, mine := range l.steps {
		a, aErr, ok := mine.boundary(l.limits)
		if !ok {
			continue
		}
		for _, theirs := range l.Race.Steps {
			near := math.Abs(math.Log(theirs.Rate/best.Carried())) <= nearBest
			if b, bErr, ok := theirs.boundary(l.limits); ok && near && mine.Evidence.Draw == theirs.Evidence.Draw {
				tell(a-b, aErr*aErr+bErr*bErr)
				break
			}
		}
	}
	if weights > 0 && l.low != nil && l.high != nil && best.Low > 0 && best.High > best.Low && l.high.Rate > l.low.Rate {
		tell((math.Log(l.low.Rate*l.high.Rate)-math.Log(best.Low*best.High))/2,
			l.bracketVariance(l.low.Rate, l.high.Rate)+l.bracketVariance(best.Low, best.High))
	}
	if weights == 0 {
		return 0, 0, false
	}
	return sum / weights, max(minRaceStdErr, math.Sqrt(1/weights)), true
}

// bracketVariance is the variance of ln capacity between a rate that passed and a rate that failed: any place between them
// is as likely as any other, and another draw would move both.
func (l *searchState) bracketVariance(low, high float64) float64 {
	width, draw := math.Log(high/low), drawErr
	for i, limit := range l.limits {
		if l.high.Evidence != nil && i < len(l.high.Evidence.Limits) && l.high.Evidence.Limits[i].Name == l.high.Binding {
			draw = max(drawErr, limit.noise/limit.fall)
		}
	}
	return width*width/12 + draw*draw
}

// boundary estimates the rate at which the step's draw would just keep all limits, from the headroom of each limit. It
// returns ln of this rate, and its standard error in a comparison with another server. The limit with the least headroom
// need not be the one that breaks first: a queue may be short until just below the boundary. ok is false if the step
// does not tell.
func (s Step) boundary(limits []response) (logRate, stdErr float64, ok bool) {
	if !s.byRequests() || s.Seen < minSeen || s.Limited != "" {
		return 0, 0, false
	}
	logRate = math.Inf(1)
	for i, limit := range s.Evidence.Limits {
		if i >= len(limits) {
			return 0, 0, false
		}
		at, off, tells := limits[i].boundary(s, limit)
		if !tells {
			return 0, 0, false
		}
		if at < logRate {
			logRate, stdErr = at, off
		}
	}
	return logRate, stdErr, stdErr < maxBoundaryErr
}

const (
	// nearBest is how far, in ln rate, a probe of the best server may be from its capacity to be compared.
	nearBest = 0.25
	// minSeen is the part of a window that must have been seen for its headroom to count. Of a window that ended early
	// nobody knows whether the rest was better.
	minSeen = 0.7
	// drawErr is how much the capacity of one server differs at least from draw to draw.
	drawErr = 0.06
	// maxBoundaryErr is how far a boundary may be off to be compared.
	maxBoundaryErr = 0.3
	// usualGain is the standard deviation of ln capacity between good servers. A gain that is less sure than this is mostly
	// luck, and is believed only in part.
	usualGain = 0.2
)

// believed returns the part of a gain that is not luck: its mean after a usual gain is taken into account. A loss stays.
func believed(gain, stdErr float64) float64 {
	if gain <= 0 {
		return gain
	}
	return gain * usualGain * usualGain / (usualGain*usualGain + stdErr*stdErr)
}

// nextOfRace returns the next rate of a race, or why it is over, and whether it is lost.
func (l *searchState) nextOfRace() (rate float64, why string, lost bool) {
	best := l.Race.Best.Carried()
	gain, stdErr, ok := l.gain()
	if !ok {
		if l.low == nil && len(l.steps) >= maxLost {
			return 0, fmt.Sprintf("lost the race: it failed at %.4g req/s; the best carries %.4g", l.high.Rate, best), true
		}
		rate, why = l.nextBlind()
		return rate, why, false
	}
	if l.high != nil && (expectedGain(gain, stdErr) < l.Race.MinGain || gain <= 0 && len(l.steps) >= enoughForLoser) {
		return 0, fmt.Sprintf("lost the race: it carries %s of what the best carries, ±%.0f %%", render.Share(math.Exp(gain)), 100*halfWidth(stdErr)), true
	}
	enough := stdErr <= raceStdErr || len(l.steps) >= enoughForWinner
	rate, why = l.nextNear(best*math.Exp(gain), enough)
	if why == "" || !l.bracketed() {
		return rate, why, false
	}
	return 0, fmt.Sprintf("won the race: it carries %s of what the best carried, ±%.0f %%", render.Share(math.Exp(gain)), 100*halfWidth(stdErr)), false
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

// nextNear returns a rate near the boundary at: it brackets the boundary, and goes on until that is enough.
func (l *searchState) nextNear(at float64, enough bool) (rate float64, why string) {
	switch {
	case l.high == nil:
		return l.upward(min(max(raceOver*at, raceUp*l.low.Rate), maxDescent*l.low.Rate))
	case l.low == nil:
		return l.downward(max(min(at, l.high.Rate/raceAbove), l.high.Rate/maxDescent))
	case l.high.Rate/l.low.Rate-1 > l.Tolerance+1e-9:
		return l.narrow()
	case !enough:
		return l.round(at * sharpenAt[len(l.steps)%len(sharpenAt)]), ""
	}
	return 0, "bracketed"
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

// againstBest returns the rate of a server that raced: the best capacity times the gain. stdErr is the standard error of
// its ln, and ratioErr the part of it that the capacities of the study do not share.
func (l *searchState) againstBest() (rate, stdErr, ratioErr float64, ok bool) {
	best := l.Race.Best
	gain, of, ok := l.gain()
	return best.Carried() * math.Exp(gain), math.Hypot(of, best.StdErr), math.Hypot(of, best.RatioErr), ok
}
