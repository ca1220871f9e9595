package capacity

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"vllmtuner/render"
)

// A Search is how to look for a capacity: gallop from a hint until a passing and a failing rate are known, halve the bracket in
// log rate, then say where in the long run just as many requests break a limit as may, over all probes. With a Precision it goes on
// probing there until the answer is that sure.
//
// Which rate comes next is a function of the steps so far alone, so that a search which knows some of them goes the way that it
// went.
type Search struct {
	Hint      float64 // first rate, requests per second
	Min, Max  float64 // rates are never outside
	Factor    float64 // of the first gallop step, > 1; the n-th in a row is Factor^n, so that a wrong hint costs little
	Tolerance float64 // of the bracket: high/low - 1 is no more than this, > 0
	MaxProbes int     // stop after so many, with what is known; at least 1
	Known     []Step  // what was probed before an interruption, in its order; they count

	Precision  float64     // half the width of the 95 % interval, as a part of the rate; 0 is content with the bracket
	Population *Population // of the workload in the long run; nil knows nothing of its bursts

	Cost   func(rate float64) time.Duration // what a probe takes, for Budget and Forecast; nil means nothing
	Budget time.Duration                    // no probe begins that would exceed it; 0 means no limit
	Plan   func(Forecast)                   // told once, when a bracket is known, what Precision will take; may be nil
}

// A Forecast is what it takes to know a capacity as precisely as was asked. The search keeps to it within a quarter, but where later
// verdicts undo its bracket and it has to look for one again.
type Forecast struct {
	Rate      float64       // as far as it is known
	Precision float64       // half the width of the interval now, as a part of the rate
	Reaches   float64       // the same after the further probes: more than was asked for where that cannot be had, or not within MaxProbes
	Probes    int           // further ones
	Takes     time.Duration // they, by Cost
}

// Find runs the search. It fails when a probe does; what the probes before it say is returned beside the error.
func (s Search) Find(ctx context.Context, probe Probe) (Capacity, error) {
	l := looking{Search: s}
	for _, step := range s.Known {
		if s.Precision > 0 {
			l.next() // what was foretold then stands
		}
		l.add(step)
	}
	for {
		rate, why := l.next()
		if why != "" {
			return l.answer(why)
		}
		outcome, err := probe(ctx, rate)
		if err != nil {
			sofar, _ := l.answer("it was ended early") // of which there is none where the load generator was the limit
			return sofar, err
		}
		l.add(Step{rate, outcome})
	}
}

// looking is the state of a search; it follows from its steps.
type looking struct {
	Search
	steps     []Step
	low, high *Step // highest pass below all fails, lowest fail above it, while the verdicts are monotone; see bracket
	spent     time.Duration
	narrowed  int       // how many steps it took until the bracket was within the tolerance; 0 when it is not yet
	forecast  *Forecast // of the probes that Precision takes; nil until there is a bracket
	planned   int       // how many steps there were then

	known    bool // place is that of the steps so far
	place    estimate
	hasPlace bool
}

// add takes one probe in.
func (l *looking) add(step Step) {
	l.steps = append(l.steps, step)
	l.low, l.high = bracket(l.steps)
	l.known = false
	if l.narrowed == 0 && l.bracketed() {
		if _, why := l.narrow(); why != "" {
			l.narrowed = len(l.steps)
		}
	}
	switch {
	case step.Took > 0:
		l.spent += step.Took
	case l.Cost != nil:
		l.spent += l.Cost(step.Rate)
	}
}

// passed reports whether a step is a pass that counts.
func (s Step) passed() bool { return s.Pass && s.Limited == "" }

// bracket returns the passing and the failing step between which the capacity lies. Where verdicts contradict each other, a pass
// above a fail, the split is where the fewest of them do, the lower one of equals. Verdicts of a load generator that was late have no
// vote: its passes raise the lower step, and its fails keep the search from going higher where nothing else does.
func bracket(steps []Step) (low, high *Step) {
	sorted := byRate(intime(steps))
	best, at := len(sorted)+1, 0
	for split := range len(sorted) + 1 { // the first split steps should pass, the others fail
		wrong := 0
		for i, step := range sorted {
			if step.Pass != (i < split) {
				wrong++
			}
		}
		if wrong < best {
			best, at = wrong, split
		}
	}
	for i := at - 1; i >= 0 && low == nil; i-- {
		if sorted[i].Pass {
			low = &sorted[i]
		}
	}
	for i := at; i < len(sorted) && high == nil; i++ {
		if !sorted[i].Pass {
			high = &sorted[i]
		}
	}
	return withLate(steps, low, high)
}

// withLate brings what a late load generator did into a bracket.
func withLate(steps []Step, low, high *Step) (*Step, *Step) {
	for i := range steps {
		if s := &steps[i]; s.Limited != "" && s.Pass && (low == nil || s.Rate > low.Rate) && (high == nil || s.Rate < high.Rate) {
			low = s
		}
	}
	if high != nil {
		return low, high
	}
	for i := range steps {
		if s := &steps[i]; s.Limited != "" && !s.Pass && (low == nil || s.Rate > low.Rate) && (high == nil || s.Rate < high.Rate) {
			high = s
		}
	}
	return low, high
}

// intime leaves out the steps that the load generator may have decided.
func intime(steps []Step) []Step {
	return slices.DeleteFunc(slices.Clone(steps), func(s Step) bool { return s.Limited != "" })
}

// next returns the rate to probe, or why the search is over.
func (l *looking) next() (rate float64, why string) {
	if len(l.steps) == 0 {
		return l.round(l.Hint), ""
	}
	if l.stumbled() {
		return l.steps[len(l.steps)-1].Rate, ""
	}
	if f := l.forecast; f != nil && l.bracketed() && f.Probes > 0 && len(l.steps)-l.planned >= f.most() {
		return 0, l.precision() + " after the time that was planned"
	}
	rate, why = l.narrow()
	if why != "" && l.bracketed() {
		rate, why = l.sharpen(why)
	}
	if why != "" && l.low != nil && l.limitedOnce(*l.low) {
		rate, why = l.low.Rate, "" // the answer would be the load generator's
	}
	switch {
	case why != "":
		return 0, why
	case len(l.steps) >= l.MaxProbes:
		return 0, "the budget of " + render.Count(len(l.steps), "probe") + " is spent"
	case l.Cost != nil && l.Budget > 0 && l.spent+l.Cost(rate) > l.Budget:
		return 0, fmt.Sprintf("the time for probes, %s, is spent", l.Budget)
	}
	return rate, ""
}

// stumbled reports whether the load generator was the limit just now, and may not be the next time: it is when it was twice at one rate.
func (l *looking) stumbled() bool {
	last := l.steps[len(l.steps)-1]
	return !last.Pass && len(l.steps) < l.MaxProbes && l.limitedOnce(last)
}

// limitedOnce reports whether the load generator was late in a step, and in no other at its rate.
func (l *looking) limitedOnce(step Step) bool {
	times := 0
	for _, s := range l.steps {
		if s.Limited != "" && s.Rate == step.Rate {
			times++
		}
	}
	return step.Limited != "" && times == 1
}

// bracketed reports whether there is a boundary that single requests can sharpen.
func (l *looking) bracketed() bool {
	return l.low != nil && l.low.Limited == "" && l.high != nil && l.high.Limited == "" && l.high.told()
}

// precision says how well the capacity is known.
func (l *looking) precision() string {
	e, ok := l.estimate()
	if !ok {
		return "not known"
	}
	return fmt.Sprintf("known to ±%.2g %%", 100*half(e.stdErr))
}

// narrow gallops and halves until the bracket is within the tolerance.
func (l *looking) narrow() (rate float64, why string) {
	low, high := l.low, l.high
	switch {
	case high == nil && low.Rate >= l.Max:
		return 0, fmt.Sprintf("passed at the highest rate, %.4g req/s", l.Max)
	case low == nil && high.Rate <= l.Min:
		return 0, fmt.Sprintf("failed at the lowest rate, %.4g req/s", l.Min)
	case high == nil:
		return l.round(low.Rate * l.stride()), ""
	case low == nil:
		return l.round(high.Rate / l.stride()), ""
	case high.Rate/low.Rate-1 <= l.Tolerance+1e-9:
		return 0, fmt.Sprintf("bracketed within %.0f %%", 100*l.Tolerance)
	}
	rate = l.round(math.Sqrt(low.Rate * high.Rate))
	if rate <= low.Rate || rate >= high.Rate {
		return 0, "the bracket is as narrow as three digits allow"
	}
	return rate, ""
}

// stride is the factor of the next step of the gallop: larger from step to step, but for a search that has had its bracket and lost
// it to later verdicts, which is not far off.
func (l *looking) stride() float64 {
	if l.narrowed > 0 {
		return l.Factor
	}
	return math.Pow(l.Factor, float64(len(l.steps)))
}

// Where a sharper answer is looked for, as parts of the best guess. Above it more requests tell of the boundary, below it they
// tell how fast their share falls.
var sharpenAt = []float64{1.05, 0.97}

// What is probed beyond a bracket before a precision is foretold: no more than mostExtra rates, and none for want of bursts where
// fewBursts were seen near the boundary. A verdict among them that undoes the bracket is followed up.
const (
	mostExtra = 2
	fewBursts = 2
)

// sharpen probes about the boundary: once more at the rate that failed where that was for a single burst, which may be luck, where the
// probes as a whole place it outside of the bracket that single verdicts make, and until it is as sure as was asked.
func (l *looking) sharpen(why string) (rate float64, sharp string) {
	e, ok := l.estimate()
	if !ok {
		return 0, why
	}
	at := math.Exp(e.logRate)
	if l.forecast == nil && len(l.steps) < l.narrowed+mostExtra {
		switch {
		case e.bursts < fewBursts:
			return l.high.Rate, ""
		case at < l.low.Rate, at > l.high.Rate:
			return l.round(at), ""
		}
	}
	if l.Precision <= 0 {
		return 0, why
	}
	now := half(e.stdErr)
	if l.forecast == nil {
		l.forecast = new(l.foresee(&e))
		l.planned = len(l.steps)
		if l.Plan != nil {
			l.Plan(*l.forecast)
		}
	}
	done := len(l.steps) - l.planned
	if l.forecast.Probes == 0 || now <= l.aim(&e) && done >= l.forecast.least() {
		return 0, l.precision()
	}
	return l.round(at * sharpenAt[done%len(sharpenAt)]), ""
}

// aim is how sure an answer is looked for: as was asked, or, where the model alone may be wrong by more, a fifth above that, as
// further probes would buy next to nothing.
func (l *looking) aim(e *estimate) float64 {
	return max(l.Precision, 1.2*half(modelError/e.fit.steepness()))
}

// A search keeps to its forecast within a quarter: what it takes is as good as a promise to whoever shares the GPU.
func (f Forecast) least() int { return int(math.Ceil(0.75 * float64(f.Probes))) }
func (f Forecast) most() int  { return max(f.Probes, int(1.25*float64(f.Probes))) }

// foresee says how many more probes will do, by the information that they are expected to bring.
func (l *looking) foresee(e *estimate) Forecast {
	f := Forecast{Rate: math.Exp(e.logRate), Precision: half(e.stdErr)}
	requests, near := 0.0, 0.0
	for _, step := range l.steps {
		if step.Evidence == nil { // the load generator may have decided
			continue
		}
		weight := nearness(math.Log(step.Rate / f.Rate))
		requests += weight * float64(step.Evidence.Counted)
		near += weight
	}
	load := l.Population.at(e.fit.kernel, f.Rate)
	information := e.fit.information
	for f.Reaches = f.Precision; f.Reaches > l.aim(e) && len(l.steps)+f.Probes < l.MaxProbes; {
		at := e.logRate + math.Log(sharpenAt[f.Probes%len(sharpenAt)])
		more := e.expected(load, at, requests/near)
		for r := range information {
			for c := range information {
				information[r][c] += more[r][c]
			}
		}
		f.Probes++
		f.Reaches = half(e.stdErrWith(information, e.bursts*(1+float64(f.Probes)/near)))
		if l.Cost != nil {
			f.Takes += l.Cost(math.Exp(at))
		}
	}
	return f
}

// round makes a rate readable, and the same in every trial, and stays in Min..Max.
func (s Search) round(rate float64) float64 { return max(s.Min, min(s.Max, ThreeDigits(rate))) }

// ThreeDigits keeps three significant digits of a rate.
func ThreeDigits(rate float64) float64 {
	rounded, err := strconv.ParseFloat(strconv.FormatFloat(rate, 'g', 3, 64), 64)
	if err != nil { // cannot be: the text was just made
		return rate
	}
	return rounded
}

// estimate is the place of the boundary by all probes: of the limit that allows the lowest rate.
func (l *looking) estimate() (estimate, bool) {
	if !l.known {
		l.place, l.hasPlace = place(l.steps, l.Population)
		l.known = true
	}
	return l.place, l.hasPlace
}
