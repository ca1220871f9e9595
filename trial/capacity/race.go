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
	Best    Capacity // the best capacity so far; if it has no rate, there is no race
	Steps   []Step   // the steps of Best with their evidence; without them nothing is known of the shape of a fit
	MinGain float64  // smallest expected gain for which the race goes on, in ln units; below it the race is lost
	Unit    string   // words after the best capacity in texts, such as " for as many GPUs"; may be ""
}

const (
	// raceAbove is the first rate of a race, as a multiple of the best capacity. An equal server then has enough slow
	// requests to count, and few enough to show where its boundary is.
	raceAbove = 1.05
	// maxDescent is the factor by which a race goes down after a fail. An estimate from far above the boundary is an
	// extrapolation, and a rate that is far too low takes a long window to pass.
	maxDescent = 1.3
	// maxLost is the number of fails that end a race if the requests show no boundary.
	maxLost = 2
	// A server that still seems worse after enoughForLoser probes loses its race, because another server promises more.
	// A server that seems better gets up to enoughForWinner probes. It gets fewer if the standard error of its gain is
	// at most raceStdErr. So does a server that seems worse, if the standard error of its gain is above loserStdErr:
	// then nobody knows whether it is worse.
	enoughForLoser  = 2
	enoughForWinner = 3
	raceStdErr      = 0.03
	loserStdErr     = 0.125
	// raceUp is the smallest factor by which a race raises the rate after its first two passes.
	raceUp = 1.1
	// maxAscent is the largest factor by which a race raises the rate. It is larger than maxDescent, because only passes
	// lead to it.
	maxAscent = 1.5
	// A race looks for the failing end of its bracket at raceOver times the estimated rate.
	raceOver = 1.06
	// minRaceStdErr is the smallest standard error of a comparison. A comparison cancels the errors that both
	// servers share, but not the others.
	minRaceStdErr = 0.02
)

// active reports whether there is a best capacity to beat.
func (r Race) active() bool { return r.Best.Carried() > 0 }

// expectedGain is the mean of max(0, gain) for a gain with a normal distribution. It is the expected improvement of
// Bayesian optimization (Jones et al. 1998) for one server.
func expectedGain(gain, stdErr float64) float64 {
	u := gain / stdErr
	return stdErr * (density(u) + u*normal(u))
}

// shapes returns a shape for each limit, learned from the steps of the best server.
func (r Race) shapes(p *Population) (all []shape) {
	probes := evidenceOf(r.Steps)
	if len(probes) == 0 || !r.active() {
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

// gain returns ln(rate / best) and its standard error. If the probes do not show the gain, ok is false. If possible,
// gain compares this server with the best server under the same requests. Some draws (sets of random requests) are
// harder than others. A hard draw does not make a server worse.
func (l *searchState) gain() (gain, stdErr float64, ok bool) {
	if gain, stdErr, ok = l.pairedGain(); ok {
		return believed(gain, stdErr), stdErr, true
	}
	best := l.Race.Best
	if l.low != nil && l.high != nil && l.high.Rate > l.low.Rate { // a bracket is surer than a regression over few requests
		middle := math.Log(l.low.Rate*l.high.Rate) / 2
		stdErr = math.Sqrt(bracketVariance(l.low.Rate, l.high.Rate, l.drawErr()) + best.StdErr*best.StdErr)
		return believed(middle-math.Log(best.Carried()), stdErr), stdErr, true
	}
	e, ok := l.estimate()
	if !ok || !l.isNear(e.logRate) {
		return 0, 0, false
	}
	stdErr = max(minRaceStdErr, e.stdErr)
	return believed(e.logRate-math.Log(best.Carried()), stdErr), stdErr, true
}

// isNear reports whether any step was near a rate. An estimate far from all steps is an extrapolation.
func (l *searchState) isNear(logRate float64) bool {
	return slices.ContainsFunc(l.steps, func(s Step) bool { return math.Abs(math.Log(s.Rate)-logRate) <= math.Log(maxDescent) })
}

// pairedGain compares two servers by their headroom under the same draws (sets of random requests), and by their
// brackets. With one probe of each server, the ratio of the capacities has a standard error of 4 % (simulated H200).
// The capacity of one server differs by 8 % from draw to draw.
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
				tell(l.withinBracket(a)-b, aErr*aErr+bErr*bErr)
				break
			}
		}
	}
	if weights > 0 && l.low != nil && l.high != nil && best.Low > 0 && best.High > best.Low && l.high.Rate > l.low.Rate {
		tell((math.Log(l.low.Rate*l.high.Rate)-math.Log(best.Low*best.High))/2,
			bracketVariance(l.low.Rate, l.high.Rate, l.drawErr())+bracketVariance(best.Low, best.High, l.drawErrOf(best.Binding, 0)))
	}
	if weights == 0 {
		return 0, 0, false
	}
	return sum / weights, max(minRaceStdErr, math.Sqrt(1/weights)), true
}

// bracketVariance is the variance of ln capacity if one rate passed and a higher rate failed. All rates between them
// are taken as equally likely. The variance between draws (sets of random requests) is added, because another draw
// would move both ends. It is the square of drawErr.
func bracketVariance(low, high, drawErr float64) float64 {
	width := math.Log(high / low)
	return width*width/12 + drawErr*drawErr
}

// drawErr returns the standard deviation of this server's ln capacity from draw to draw. It uses the fall of the
// headroom inside the bracket, because the limit that breaks here may not be the one that breaks on the best server.
func (l *searchState) drawErr() float64 {
	fall := 0.0
	for i, limit := range l.high.limits() {
		if below := l.low.limits(); limit.Name == l.high.Binding && i < len(below) {
			fall = (limit.prior().clamp(below[i].Headroom) - limit.prior().clamp(limit.Headroom)) / math.Log(l.high.Rate/l.low.Rate)
		}
	}
	return l.drawErrOf(l.high.Binding, fall)
}

// drawErrOf returns the standard deviation of ln capacity from draw to draw if the limit of that name breaks first.
// knownFall is the fall of this limit's headroom in this server's own probes; 0 if they show none.
func (l *searchState) drawErrOf(name string, knownFall float64) float64 {
	for i, limit := range l.high.limits() {
		if limit.Name == name && i < len(l.limits) {
			return max(minDrawErr, l.limits[i].noise/max(l.limits[i].fall, knownFall))
		}
	}
	return minDrawErr
}

// limits returns the evidence for each limit, or nothing if the step has no evidence.
func (s Step) limits() []LimitEvidence {
	if s.Evidence == nil {
		return nil
	}
	return s.Evidence.Limits
}

// withinBracket moves an extrapolated boundary (ln rate) between the rates that this server passed and failed. The
// extrapolation uses the best server's headrooms. They may fall more slowly, for example because no queue forms on the
// best server.
func (l *searchState) withinBracket(logRate float64) float64 {
	if l.high != nil && l.high.Limited == "" {
		logRate = min(logRate, math.Log(l.high.Rate)+bracketSlack)
	}
	if l.low != nil {
		logRate = max(logRate, math.Log(l.low.Rate)-bracketSlack)
	}
	return logRate
}

// boundary estimates the rate at which the requests of the step would just keep all limits, from the headroom of each
// limit. It returns ln of this rate, and its standard error in a comparison with another server. The limit with the
// least headroom may not be the limit that breaks first, because a queue may stay short until just below the boundary.
// If the step does not show the rate, ok is false.
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
	// A probe of the best server is compared only if its rate is near that server's capacity: at most nearBest away in
	// ln rate.
	nearBest = 0.25
	// The headroom of a window counts only if at least the fraction minSeen of the window was seen. If a window ended
	// early, nobody knows whether the rest was better.
	minSeen = 0.7
	// minDrawErr is the smallest standard deviation of one server's ln capacity from draw to draw (from one set of
	// random requests to another).
	minDrawErr = 0.06
	// bracketSlack is how far, in ln rate, a boundary may lie outside the bracket of passed and failed rates. The ends
	// of the bracket come from other draws than the comparison, so a boundary outside the bracket may be right.
	bracketSlack = 2 * minDrawErr
	// maxBoundaryErr limits the standard error, in ln rate, of a boundary that is compared.
	maxBoundaryErr = 0.3
	// priorGain is the standard deviation of ln capacity between good servers. A gain with a larger standard error is
	// mostly luck, so believed (see below) reduces it.
	priorGain = 0.2
)

// believed returns the part of a gain that is probably not luck: the posterior mean, if priorGain is the standard
// deviation of the prior. It does not change a loss.
func believed(gain, stdErr float64) float64 {
	if gain <= 0 {
		return gain
	}
	return gain * priorGain * priorGain / (priorGain*priorGain + stdErr*stdErr)
}

// nextOfRace returns the next rate of a race. If the race is over, it returns why, and whether the race is lost.
func (l *searchState) nextOfRace() (rate float64, why string, lost bool) {
	best := l.Race.Best.Carried()
	gain, stdErr, ok := l.gain()
	if !ok {
		if l.low == nil && len(l.steps) >= maxLost {
			return 0, fmt.Sprintf("lost the race: it failed at %s req/s; the best carries %s%s", render.Number(l.high.Rate), render.Number(best), l.Race.Unit), true
		}
		rate, why = l.nextBlind()
		return rate, why, false
	}
	if l.high != nil && (expectedGain(gain, stdErr) < l.Race.MinGain || gain <= 0 && l.enoughForLoser(stdErr)) {
		return 0, fmt.Sprintf("lost the race: it carries %s of what the best carries%s, ±%.0f %%", render.Share(math.Exp(gain)), l.Race.Unit, 100*halfWidth(stdErr)), true
	}
	enough := stdErr <= raceStdErr || len(l.steps) >= enoughForWinner
	rate, why = l.nextNear(best*math.Exp(gain), enough)
	if why == "" || !l.bracketed() {
		return rate, why, false
	}
	return 0, fmt.Sprintf("won the race: it carries %s of what the best carried%s, ±%.0f %%", render.Share(math.Exp(gain)), l.Race.Unit, 100*halfWidth(stdErr)), false
}

// enoughForLoser reports whether a server that seems worse than the best has had enough probes. stdErr is the standard
// error of its gain.
func (l *searchState) enoughForLoser(stdErr float64) bool {
	return len(l.steps) >= enoughForWinner || len(l.steps) >= enoughForLoser && stdErr <= loserStdErr
}

// nextBlind returns the next rate of a race where the requests show no boundary: hardly any request was slow, or hardly
// any was quick.
func (l *searchState) nextBlind() (rate float64, why string) {
	switch {
	case l.high == nil:
		return l.upward(l.low.Rate * l.ascent())
	case l.low == nil:
		return l.downward(l.high.Rate / maxDescent)
	}
	return l.narrow()
}

// nextNear returns the next rate near the estimated boundary. It first brackets the boundary. Then it returns rates
// near the boundary until enough is true.
func (l *searchState) nextNear(boundary float64, enough bool) (rate float64, why string) {
	switch {
	case l.high == nil:
		up := l.ascent()
		return l.upward(min(max(raceOver*boundary, up*l.low.Rate), max(up, maxDescent)*l.low.Rate))
	case l.low == nil:
		return l.downward(max(min(boundary, l.high.Rate/raceAbove), l.high.Rate/maxDescent))
	case l.high.Rate/l.low.Rate-1 > l.Tolerance+1e-9:
		return l.narrow()
	case !enough:
		return l.round(boundary * sharpenAt[len(l.steps)%len(sharpenAt)]), ""
	}
	return 0, "bracketed"
}

// ascent returns the smallest factor by which a race raises the rate after a pass. It grows with each pass after the
// second, if no rate has failed: such a server carries far more than the best, and the boundary that the best server's
// headrooms promise is too low.
func (l *searchState) ascent() float64 {
	passed := map[float64]bool{}
	for _, s := range l.steps {
		if !s.Pass {
			return raceUp
		}
		passed[s.Rate] = true
	}
	return min(maxAscent, math.Pow(raceUp, math.Exp2(float64(max(0, len(passed)-2)))))
}

// upward and downward return the rate, rounded to three digits. If no further rate may be probed, they return why.
func (l *searchState) upward(rate float64) (float64, string) {
	if l.low.Rate >= l.Max {
		return 0, fmt.Sprintf("passed at the highest rate, %s req/s", render.Rate(l.Max))
	}
	return l.round(rate), ""
}

func (l *searchState) downward(rate float64) (float64, string) {
	if l.high.Rate <= l.Min {
		return 0, fmt.Sprintf("failed at the lowest rate, %s req/s", render.Rate(l.Min))
	}
	return l.round(rate), ""
}

// againstBest returns the rate of a server that raced: the best capacity times the gain. The result stdErr is the
// standard error of ln rate. The result ratioErr is the part of stdErr that the capacities of the study do not share.
func (l *searchState) againstBest() (rate, stdErr, ratioErr float64, ok bool) {
	best := l.Race.Best
	gain, of, ok := l.gain()
	return best.Carried() * math.Exp(gain), math.Hypot(of, best.StdErr), math.Hypot(of, best.RatioErr), ok
}
