package capacity

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/samber/lo"

	"vllmtuner/render"
)

// A Search says how to look for a capacity. It begins at a hint and changes the rate in growing steps (gallops) until
// it knows a rate that passed and a rate that failed. Then it halves this bracket in ln rate. From the requests of all
// probes it estimates the rate at which exactly the allowed share of requests breaks a limit in the long run. With a
// Precision it goes on probing near that rate until the answer is precise enough.
//
// The steps so far alone decide the next rate. A search that is resumed with its steps therefore goes on as if it had
// not been interrupted.
type Search struct {
	Hint      float64 // first rate, requests per second
	Min, Max  float64 // lowest and highest rate that may be probed
	Factor    float64 // > 1; gallop step n changes the rate by Factor^n, so that a wrong hint costs few probes
	Tolerance float64 // the bracket is narrow enough when high/low - 1 is no more than this, > 0
	MaxProbes int     // the search stops after this many probes and answers with what it knows; at least 1
	MaxFails  int     // the search ends after this many fails without a pass; 0 means no limit
	Known     []Step  // steps before an interruption, in order; MaxProbes counts them too

	Precision  float64     // wanted half width of the 95 % interval, as a fraction of the rate; 0 means that the bracket is enough
	Population *Population // the workload in the long run; nil means evenly spread requests of equal size

	Race Race // the best server so far, to compare with; the zero Race means no comparison

	Cost   func(rate float64) time.Duration // how long a probe takes, for Budget and Forecast; nil means no time
	Budget time.Duration                    // time for all probes; a probe that would exceed it does not begin; 0 means no limit
	Plan   func(Forecast)                   // called once, when a bracket is known, with the forecast for Precision; may be nil
}

// A Forecast says what the wanted Precision will cost. The search makes at most a quarter more or fewer probes than
// forecast. It may need more if later verdicts undo the bracket, because it then has to find another one.
type Forecast struct {
	Rate      float64       // estimated so far
	Precision float64       // half width of the interval now, as a fraction of the rate
	Reaches   float64       // half width after the further probes; larger than wanted if MaxProbes or the error of the model prevents it
	Probes    int           // number of further probes
	Takes     time.Duration // time of the further probes, according to Cost
}

// Find runs the search. If probe returns an error, Find returns it, with the capacity that is known so far.
func (s Search) Find(ctx context.Context, probe Probe) (Capacity, error) {
	l := searchState{Search: s, shapes: s.Race.shapes(s.Population), limits: responses(s.Race.Steps)}
	for _, step := range s.Known {
		if s.Precision > 0 {
			l.next() // repeats the forecast after the same step as before the interruption
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
			sofar, _ := l.answer("it was ended early") // this fails if the load generator was the limit; then there is no answer
			return sofar, err
		}
		l.add(Step{rate, outcome})
	}
}

// A searchState is the state of a search. It follows from the settings and the steps alone.
type searchState struct {
	Search
	steps     []Step
	low, high *Step // the bracket, as bracket() returns it
	spent     time.Duration
	narrowed  int        // number of steps when the bracket was first within the tolerance; 0 before
	forecast  *Forecast  // nil until there is a bracket; always nil without a Precision
	shapes    []shape    // shapes of the fits, by limit; empty in a search that is no race
	limits    []response // responses of the best server, by limit; empty in a search that is no race
	planned   int        // number of steps when the forecast was made

	known     bool // whether located and canLocate are up to date
	located   estimate
	canLocate bool
}

func (l *searchState) add(step Step) {
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

// passed reports whether a step passed with the load generator on time.
func (s Step) passed() bool { return s.Pass && s.Limited == "" }

// bracket returns the passing and the failing step between which the capacity lies. If a pass lies above a fail,
// bracket splits the sorted steps where the fewest verdicts contradict the split. Of several such splits it takes the
// lowest. Steps with a late load generator do not count here; withLate adds them.
func bracket(steps []Step) (low, high *Step) {
	sorted := byRate(inTime(steps))
	best, at := len(sorted)+1, 0
	for split := range len(sorted) + 1 { // below the split all steps should pass, above it all should fail
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

// withLate adds the steps with a late load generator to a bracket. A pass raises the lower end. A fail becomes the
// upper end only if there is no other.
func withLate(steps []Step, low, high *Step) (*Step, *Step) {
	inside := func(s *Step) bool {
		return s.Limited != "" && (low == nil || s.Rate > low.Rate) && (high == nil || s.Rate < high.Rate)
	}
	for i := range steps {
		if s := &steps[i]; s.Pass && inside(s) {
			low = s
		}
	}
	if high != nil {
		return low, high
	}
	for i := range steps {
		if s := &steps[i]; !s.Pass && inside(s) {
			high = s
		}
	}
	return low, high
}

// inTime returns the steps in which the load generator was in time.
func inTime(steps []Step) []Step {
	return slices.DeleteFunc(slices.Clone(steps), func(s Step) bool { return s.Limited != "" })
}

// next returns the next rate to probe. If the search is over, it returns the reason as why.
func (l *searchState) next() (rate float64, why string) {
	if len(l.steps) == 0 {
		return l.first(), ""
	}
	if l.justLimited() {
		return l.steps[len(l.steps)-1].Rate, ""
	}
	if f := l.forecast; f != nil && l.bracketed() && f.Probes > 0 && len(l.steps)-l.planned >= f.most() {
		return 0, l.precision() + " after the time that was planned"
	}
	rate, why = l.nextByVerdicts()
	if why != "" && l.low != nil && l.limitedOnce(*l.low) {
		rate, why = l.low.Rate, "" // repeat this rate, because otherwise the load generator would decide the answer
	}
	switch {
	case why != "":
		return 0, why
	case l.MaxFails > 0 && l.low == nil && len(inTime(l.steps)) >= l.MaxFails:
		return 0, fmt.Sprintf("failed at %s, down to %s req/s", render.Count(len(inTime(l.steps)), "rate"), render.Rate(l.high.Rate))
	case len(l.steps) >= l.MaxProbes:
		return 0, "the budget of " + render.Count(len(l.steps), "probe") + " is spent"
	case l.Cost != nil && l.Budget > 0 && l.spent+l.Cost(rate) > l.Budget && len(l.steps) > 0:
		return 0, fmt.Sprintf("the time for probes, %s, is spent", render.Span(l.Budget))
	}
	return rate, ""
}

// first returns the rate of the first probe.
func (l *searchState) first() float64 {
	if l.Race.active() {
		return l.round(raceAbove * l.Race.Best.Carried())
	}
	return l.round(l.Hint)
}

// nextByVerdicts returns the next rate by the results so far. It does not check MaxFails, MaxProbes and Budget.
func (l *searchState) nextByVerdicts() (rate float64, why string) {
	if l.Race.active() && l.forecast == nil {
		rate, why, lost := l.nextOfRace()
		if why == "" || lost || l.Precision <= 0 || !l.bracketed() {
			return rate, why
		}
	}
	rate, why = l.narrow()
	if why != "" && l.bracketed() {
		rate, why = l.sharpen(why)
	}
	return rate, why
}

// justLimited reports whether the last probe failed with a late load generator, for the first time at its rate. That
// rate is then probed again.
func (l *searchState) justLimited() bool {
	last := l.steps[len(l.steps)-1]
	return !last.Pass && len(l.steps) < l.MaxProbes && l.limitedOnce(last)
}

// limitedOnce reports whether the load generator was late in this step, and in no other step at its rate.
func (l *searchState) limitedOnce(step Step) bool {
	times := 0
	for _, s := range l.steps {
		if s.Limited != "" && s.Rate == step.Rate {
			times++
		}
	}
	return step.Limited != "" && times == 1
}

// bracketed reports whether there is a bracket, both ends were measured with the load generator on time, and slow
// requests caused the fail. Only then can single requests make the answer more precise.
func (l *searchState) bracketed() bool {
	return l.low != nil && l.low.Limited == "" && l.high != nil && l.high.Limited == "" && l.high.byRequests()
}

func (l *searchState) precision() string {
	e, ok := l.estimate()
	if !ok {
		return "not known"
	}
	return fmt.Sprintf("known to ±%.2g %%", 100*halfWidth(e.stdErr))
}

// narrow returns the next rate that finds or halves the bracket. If no such rate is left, it returns the reason as why.
func (l *searchState) narrow() (rate float64, why string) {
	low, high := l.low, l.high
	switch {
	case high == nil && low.Rate >= l.Max:
		return 0, fmt.Sprintf("passed at the highest rate, %s req/s", render.Rate(l.Max))
	case low == nil && high.Rate <= l.Min:
		return 0, fmt.Sprintf("failed at the lowest rate, %s req/s", render.Rate(l.Min))
	case high == nil:
		return l.round(low.Rate * l.stride(len(l.steps))), ""
	case low == nil:
		return l.round(high.Rate / l.stride(l.stepDown())), ""
	case high.Rate/low.Rate-1 <= l.Tolerance+1e-9:
		return 0, fmt.Sprintf("bracketed within %.0f %%", 100*l.Tolerance)
	}
	rate = l.round(math.Sqrt(low.Rate * high.Rate))
	if rate <= low.Rate || rate >= high.Rate {
		return 0, "the bracket is as narrow as three digits allow"
	}
	return rate, ""
}

// stride is the factor of gallop step n, which grows from step to step. If later verdicts have undone a bracket, the
// factor stays small, because the boundary is near.
func (l *searchState) stride(n int) float64 {
	if l.narrowed > 0 {
		return l.Factor
	}
	return math.Pow(l.Factor, float64(n))
}

// stepDown is the number of the next gallop step to a lower rate. A probe ends early if its rate is far too high. So a
// failed probe that saw its whole window was near the boundary, and the steps are counted anew from there. Far below the
// boundary a probe is a waste of time: 300 requests at 0.1 req/s take 50 minutes.
func (l *searchState) stepDown() int {
	near := lo.CountBy(l.steps, func(s Step) bool { return s.Seen >= 1 })
	return cmp.Or(near, len(l.steps))
}

// sharpenAt are the rates of the probes that make an estimate more precise, relative to the estimated rate. A probe
// above that rate sees more slow requests. A probe below it shows how fast their share falls.
var sharpenAt = []float64{1.05, 0.97}

// A search with a bracket makes up to maxExtra more probes before its forecast. It probes the failed rate again if
// probes near the boundary saw fewer than fewBursts bursts. If such a probe undoes the bracket, the search looks for
// another one.
const (
	maxExtra  = 2
	fewBursts = 2
)

// sharpen returns the next rate near the boundary, or why no further probe is needed. It repeats a rate that failed by
// a single burst, because that may be chance. If the estimate lies outside the bracket, it returns the estimated rate.
// It goes on until the answer has the wanted precision.
func (l *searchState) sharpen(why string) (rate float64, sharp string) {
	e, ok := l.estimate()
	if !ok {
		return 0, why
	}
	at := math.Exp(e.logRate)
	if l.forecast == nil && l.Race.MinGain <= 0 && len(l.steps) < l.narrowed+maxExtra {
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
	now := halfWidth(e.stdErr)
	if l.forecast == nil {
		l.forecast = new(l.foresee(&e))
		l.planned = len(l.steps)
		if l.Plan != nil {
			l.Plan(*l.forecast)
		}
	}
	done := len(l.steps) - l.planned
	if l.forecast.Probes == 0 || now <= l.aim() && done >= l.forecast.least() {
		return 0, l.precision()
	}
	return l.round(at * sharpenAt[done%len(sharpenAt)]), ""
}

// aim is the half width of the interval at which the search stops. It is the wanted precision, but at least 1.2 times
// the half width that the error of the model alone causes. Further probes would hardly improve on that.
func (l *searchState) aim() float64 {
	return max(l.Precision, 1.2*halfWidth(modelError))
}

// least and most are the smallest and the largest number of further probes that a search makes. They are about 0.75 and
// 1.25 times the forecast number, because others who share the GPU rely on the forecast.
func (f Forecast) least() int { return int(math.Ceil(0.75 * float64(f.Probes))) }
func (f Forecast) most() int  { return max(f.Probes, int(1.25*float64(f.Probes))) }

// foresee forecasts how many more probes are needed, from the information that each probe is expected to bring.
func (l *searchState) foresee(e *estimate) Forecast {
	f := Forecast{Rate: math.Exp(e.logRate), Precision: halfWidth(e.stdErr)}
	requests := 0.0
	for _, step := range l.steps {
		if step.Evidence == nil { // the load generator was late in this step
			continue
		}
		requests += nearness(math.Log(step.Rate/f.Rate)) * float64(step.Evidence.Counted)
	}
	load := l.Population.fluctuationAt(e.fit.kernel, f.Rate)
	information := e.fit.information
	for f.Reaches = f.Precision; f.Reaches > l.aim() && len(l.steps)+f.Probes < l.MaxProbes; {
		at := e.logRate + math.Log(sharpenAt[f.Probes%len(sharpenAt)])
		more := e.expected(load, at, requests/e.near)
		for r := range information {
			for c := range information {
				information[r][c] += more[r][c]
			}
		}
		f.Probes++
		near := e.near + float64(f.Probes)
		f.Reaches = halfWidth(e.stdErrWith(information, e.bursts*near/e.near, near))
		if l.Cost != nil {
			f.Takes += l.Cost(math.Exp(at))
		}
	}
	return f
}

// round returns a rate of three digits between Min and Max. Such a rate is readable. Rounding also makes it more likely
// that two trials probe the same rate.
func (s Search) round(rate float64) float64 { return max(s.Min, min(s.Max, ThreeDigits(rate))) }

// ThreeDigits rounds a rate to three significant digits.
func ThreeDigits(rate float64) float64 {
	rounded, _ := strconv.ParseFloat(strconv.FormatFloat(rate, 'g', 3, 64), 64) // no error: FormatFloat wrote the number
	return rounded
}

// estimate returns the lowest boundary of all limits, from all probes.
func (l *searchState) estimate() (estimate, bool) {
	if !l.known {
		l.located, l.canLocate = locate(l.steps, l.Population, l.shapes)
		l.known = true
	}
	return l.located, l.canLocate
}
