package capacity

import (
	"fmt"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"

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
	var probes []*Evidence
	for _, step := range inTime(r.Steps) {
		if step.Evidence != nil {
			probes = append(probes, step.Evidence)
		}
	}
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
		stdErr = math.Sqrt(bracketVariance(l.low.Rate, l.high.Rate, l.Race.queueSlope()) + best.StdErr*best.StdErr)
		return believed(middle-math.Log(best.Carried()), stdErr), stdErr, true
	}
	e, ok := l.estimate()
	if !ok {
		return 0, 0, false
	}
	stdErr = max(minRaceStdErr, e.stdErr)
	return believed(e.logRate-math.Log(best.Carried()), stdErr), stdErr, true
}

// pairedGain compares two servers by their headroom under the same draws, and by their brackets. One probe of each tells
// their ratio to within 4 % (standard deviation, simulated H200), where single capacities differ by 8 % from draw to draw.
func (l *searchState) pairedGain() (gain, stdErr float64, ok bool) {
	best, slope := l.Race.Best, l.Race.queueSlope()
	sum, weights := 0.0, 0.0
	tell := func(gain, variance float64) {
		sum += gain / variance
		weights += 1 / variance
	}
	for _, mine := range l.steps {
		i := slices.IndexFunc(l.Race.Steps, func(theirs Step) bool {
			near := math.Abs(math.Log(theirs.Rate/best.Carried())) <= nearBest
			return near && mine.tells(slope) && theirs.tells(slope) && mine.Evidence.Draw == theirs.Evidence.Draw
		})
		if i < 0 {
			continue
		}
		a, aErr := mine.boundary(slope)
		b, bErr := l.Race.Steps[i].boundary(slope)
		tell(a-b, aErr*aErr+bErr*bErr)
	}
	if weights > 0 && l.low != nil && l.high != nil && best.Low > 0 && best.High > best.Low && l.high.Rate > l.low.Rate {
		mine, theirs := bracketVariance(l.low.Rate, l.high.Rate, slope), bracketVariance(best.Low, best.High, slope)
		tell((math.Log(l.low.Rate*l.high.Rate)-math.Log(best.Low*best.High))/2, mine+theirs)
	}
	if weights == 0 {
		return 0, 0, false
	}
	return sum / weights, max(minRaceStdErr, math.Sqrt(1/weights)), true
}

// bracketVariance is the variance of ln capacity between a rate that passed and a rate that failed: any place between them
// is as likely as any other, and another draw would move both.
func bracketVariance(low, high, slope float64) float64 {
	width, draw := math.Log(high/low), max(drawErr, slope*queueNoise)
	return width*width/12 + draw*draw
}

// tells reports whether the headroom of a step shows how far the boundary is.
func (s Step) tells(slope float64) bool {
	if !s.byRequests() || s.Seen < minSeen || s.Limited != "" {
		return false
	}
	_, stdErr := s.boundary(slope)
	return stdErr < maxBoundaryErr
}

// boundary returns ln of the rate at which the step's draw would just keep all limits, by the headroom of each limit, and
// its standard error in a comparison with another server. slope is that of queues. The limit with the least headroom need
// not be the one that breaks first: a queue may be short until just below the boundary.
func (s Step) boundary(slope float64) (logRate, stdErr float64) {
	logRate = math.Inf(1)
	for _, limit := range s.Evidence.Limits {
		at, off := math.Log(s.Rate)+perTokenSlope*limit.Headroom, math.Hypot(perTokenNoise, perTokenSlopeErr*limit.Headroom)
		if limit.Queue {
			at, off = math.Log(s.Rate)+slope*limit.Headroom, slope*math.Hypot(queueNoise, queueSlopeErr*limit.Headroom)
			if limit.Headroom < 0 { // the queue may be one that grows
				off = max(off, -grownQueueErr*limit.Headroom)
			}
		}
		if at < logRate {
			logRate, stdErr = at, off
		}
	}
	return logRate, stdErr
}

// queueSlope returns the change of ln rate that changes the headroom of a time to first token by one. A queue that forms
// at the boundary makes it small; where the share of slow requests is nearly flat in the rate it is large. The steps of
// the best server tell, together with what is usual.
func (r Race) queueSlope() float64 {
	var x, y []float64
	for _, step := range r.Steps {
		if step.Evidence == nil || step.Limited != "" {
			continue
		}
		for _, limit := range step.Evidence.Limits {
			if limit.Queue {
				x, y = append(x, math.Log(step.Rate)), append(y, max(-maxQueueHeadroom, min(maxQueueHeadroom, limit.Headroom)))
			}
		}
	}
	fall := usualFall
	if len(x) > 1 {
		covariance := stat.Covariance(x, y, nil)
		n, noise := float64(len(x)-1), fallNoise*fallNoise
		known := n * stat.Variance(x, nil) / noise
		fall = (usualFall/(usualFallErr*usualFallErr) - n*covariance/noise) / (1/(usualFallErr*usualFallErr) + known)
	}
	return 1 / max(minFall, fall)
}

const (
	// A time per token grows about as the batch does: perTokenSlope is the change of ln rate that changes its headroom by
	// one, with its standard deviation between servers. perTokenNoise is the noise of one probe in a comparison (simulated
	// H200).
	perTokenSlope, perTokenSlopeErr, perTokenNoise = 1.0, 0.3, 0.025
	// The headroom of a time to first token falls by usualFall where the rate grows by a factor of e. One probe's differs by
	// queueNoise from another server's that is as good, and by fallNoise from the line through several draws.
	usualFall, usualFallErr, minFall     = 10.0, 8.0, 0.7
	queueNoise, queueSlopeErr, fallNoise = 0.25, 0.5, 0.4
	// Beyond maxQueueHeadroom a headroom only says that the rate is far away.
	maxQueueHeadroom = 2
	// A queue that has broken the limit may be one that grows, and then its headroom tells little of the rate.
	grownQueueErr = 0.4
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
	if expectedGain(gain, stdErr) < l.Race.MinGain || gain <= 0 && len(l.steps) >= enoughForLoser {
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

// againstBest returns the rate of a server that raced, and the standard error of its ln: the best capacity times the gain.
// All capacities of a study then have the error of the first one in common, and their ratios do not.
func (l *searchState) againstBest() (rate, stdErr float64, ok bool) {
	gain, of, ok := l.gain()
	return l.Race.Best.Carried() * math.Exp(gain), math.Hypot(of, l.Race.Best.StdErr), ok
}
