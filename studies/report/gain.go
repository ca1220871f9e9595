package report

import (
	"cmp"
	"fmt"
	"slices"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial/capacity"
)

// A gain compares the best trial with the reference: what the user has without the tuner.
type gain struct {
	Trial  int            `json:"over_trial"`    // number of the reference
	Origin studies.Origin `json:"over_origin"`   // origin of the reference
	Why    string         `json:"why,omitempty"` // why the reference is not the default
	Ratio  float64        `json:"ratio"`         // best / reference - 1, as measured or a lower bound; 0 when it is not known
	Bound  capacity.Bound `json:"bound"`         // bound of the ratio; exact means as measured, "" means not known

	// Comparison says how sure the gain is; nil when that is not known. Its ratio is best / reference. It is corrected,
	// because the best was chosen from several trials; Among is the number of these trials. If they were all equally
	// good, chance would give such a gain in 1 - p_better of all studies.
	Comparison      *capacity.Comparison `json:"comparison,omitempty"`
	Among           int                  `json:"among,omitempty"` // number of measured trials, without the reference
	Distinguishable bool                 `json:"distinguishable"` // the comparison finds the best trial better

	reference capacity.Capacity // as the objective counts it, like all capacities of the gain
}

// gainOf compares the best trial with the reference. The reference is the default if that was measured, or else the
// current args, or else the first measured trial. The parameter candidates is the number of measured trials. gainOf
// returns nil while the default is still to be measured.
//
// All trials are of one world. The default need not be the first of them, because a change of the server is noticed
// only when a later trial runs.
func gainOf(o studies.Objective, best studies.Trial, trials []studies.Trial, candidates int) *gain {
	first := slices.IndexFunc(trials, func(t studies.Trial) bool { return t.Origin == studies.Default })
	i := cmp.Or(1+lastMeasured(trials, studies.Default), 1+lastMeasured(trials, studies.Current), 1+slices.IndexFunc(trials, measured)) - 1
	if first < 0 && trials[i].Origin == studies.Sampled || first >= 0 && trials[first].State != studies.Done {
		return nil
	}
	reference := trials[i]
	g := &gain{Trial: reference.Number, Origin: reference.Origin, reference: o.Of(reference)}
	if first >= 0 && reference.Origin != studies.Default {
		g.Why = "the default could not be measured: " + string(trials[first].Result.Class)
	}
	if g.Trial == best.Number {
		g.Bound = capacity.Exact
		return g
	}
	g.compare(o.Of(best), candidates)
	return g
}

// compare sets how much the best trial gains over the reference, and how sure that is. The parameter candidates is the
// number of trials from which the best was chosen.
func (g *gain) compare(best capacity.Capacity, candidates int) {
	g.Ratio, g.Bound = ratio(best, g.reference)
	g.Comparison, g.Among, g.Distinguishable = nil, 0, false
	if c, ok := capacity.Compare(best, g.reference); ok {
		g.Among = max(1, candidates-1)
		g.Comparison = new(c.Among(g.Among))
		g.Distinguishable = g.Comparison.Distinguishable()
	}
}

// confirmGain compares the confirmed trial with the confirmed reference, if there is one. Both trials had the same
// fresh requests.
func (b *Winner) confirmGain(confirmed studies.Trial, trials []studies.Trial, finalists int) {
	if b.Gain == nil || b.Gain.Trial == b.Found.Number {
		return
	}
	reference := trials[slices.IndexFunc(trials, func(t studies.Trial) bool { return t.Number == b.Gain.Trial })].Point.String()
	for _, t := range trials {
		if t.Origin == studies.Confirmed && t.Met() && t.Point.String() == reference {
			b.Gain.reference = b.objective.Of(t)
			b.Gain.compare(b.objective.Of(confirmed), finalists)
		}
	}
}

// lastMeasured returns the index of the newest measured trial of an origin, or -1. It prefers trials whose load
// generator was in time.
func lastMeasured(trials []studies.Trial, origin studies.Origin) int {
	of := -1
	for i, t := range trials {
		limited := t.Result.Class == serverctl.ClientLimited
		if t.Origin == origin && measured(t) && (of < 0 || !limited) {
			of = i
		}
	}
	return of
}

// ratio returns best/reference - 1, and whether it is as measured or a lower bound. If the ratio is not known, it
// returns 0 and "". The ratio is not known if the reference is itself a bound. If the best is a lower bound, it is
// compared with the upper end of the reference's interval, because a single verdict may be chance.
func ratio(best, reference capacity.Capacity) (float64, capacity.Bound) {
	if !reference.Known() {
		return 0, ""
	}
	if best.Bound == capacity.Exact {
		return best.Rate/reference.Rate - 1, capacity.Exact
	}
	if least := lower(best); reference.StdErr > 0 && least > upper(reference) {
		return least/upper(reference) - 1, capacity.AtLeast
	}
	return 0, ""
}

// upper and lower are the ends of a capacity's interval or bracket, whichever is wider.
func upper(c capacity.Capacity) float64 { return max(c.Highest, c.High) }

func lower(c capacity.Capacity) float64 { return min(c.Low, cmp.Or(c.Lowest, c.Low)) }

// headline says in one sentence what the user should do.
func headline(b Winner, state studies.State) string {
	use := "Use these flags"
	if state == studies.Running {
		use = "The best flags so far"
	}
	g := b.Gain
	if g == nil {
		return "These are the best flags known so far; the default has not been measured yet."
	}
	over, r, per := originName(g.Origin), g.reference, b.objective.Per()
	switch c := b.Found.Result.Capacity; {
	case g.Trial == b.Found.Number && !slices.ContainsFunc(b.same, func(t studies.Trial) bool { return t.State == studies.Done && t.Number != g.Trial }):
		return fmt.Sprintf("Nothing has been compared with %s yet.", over)
	case g.Trial == b.Found.Number && g.Origin != studies.Default && g.Origin != studies.Current:
		return fmt.Sprintf("%s: no others are known to carry more%s.", use, per)
	case g.Trial == b.Found.Number && state == studies.Running:
		return fmt.Sprintf("The best so far is %s: no other flags are known to carry more%s.", over, per)
	case g.Trial == b.Found.Number:
		return fmt.Sprintf("Keep %s: no other flags are known to carry more%s.", over, per)
	case c.PassedLate():
		return fmt.Sprintf("These flags carried about %s req/s, but the load generator was late; it is not known whether they beat %s.", render.Number(c.Rate), over)
	case g.Distinguishable:
		return fmt.Sprintf("%s: %s%s over %s, %s likely better.", use, render.Percent(g.Ratio), per, over, probability(g.Comparison.Better))
	case g.Bound == capacity.AtLeast:
		return fmt.Sprintf("%s: at least %s%s over %s.", use, render.Percent(g.Ratio), per, over)
	case g.Comparison != nil:
		return fmt.Sprintf("No flags are known to beat %s%s; these measured higher, but that may be chance.", over, per)
	case r.Bound == capacity.AtMost:
		return fmt.Sprintf("%s: they keep the SLO at %s req/s, and %s is not known to keep it at any rate.", use, render.Number(c.Low), over)
	}
	return fmt.Sprintf("These are the best flags known; it is not known whether they beat %s.", over)
}

// originName returns a name for the flags of an origin, such as "the current args".
func originName(o studies.Origin) string {
	switch o {
	case studies.Default:
		return "the default"
	case studies.Current:
		return "the current args"
	}
	return "the first flags that could be measured"
}

// gainText says how much more the best trial carries than the reference.
func gainText(b Winner) string {
	g := b.Gain
	if g == nil {
		return "not known: the default has not been measured yet"
	}
	reference := fmt.Sprintf("trial %d, %s", g.Trial, originName(g.Origin))
	if g.reference.Known() {
		reference += fmt.Sprintf(" (%s req/s%s)", render.Number(g.reference.Rate), b.objective.Per())
	}
	switch {
	case g.Trial == b.Found.Number:
		return fmt.Sprintf("none: the best is %s", reference)
	case g.Bound == "":
		return fmt.Sprintf("over %s: not known; %s", reference, unsureText(b))
	case g.Bound == capacity.AtLeast:
		return fmt.Sprintf("at least %s%s over %s, which carries at most %s", render.Percent(g.Ratio), b.objective.Per(), reference, render.Number(upper(g.reference)))
	}
	return fmt.Sprintf("%s%s as measured, over %s", render.Percent(g.Ratio), b.objective.Per(), reference)
}

// trustText says how sure the gain is; "" when there is no exact gain over another trial.
func trustText(b Winner) string {
	g := b.Gain
	if g == nil || g.Bound != capacity.Exact || g.Trial == b.Found.Number {
		return ""
	}
	c := g.Comparison
	if c == nil {
		return "the certainty of this gain is not known: " + unsureText(b)
	}
	text := fmt.Sprintf("95 %%: %s to %s; ", render.Percent(c.Lowest-1), render.Percent(c.Highest-1))
	equal := "equally good flags"
	if g.Among > 1 {
		equal = fmt.Sprintf("the best of %d equally good trials", g.Among)
	}
	switch {
	case !g.Distinguishable: // the corrected probability may be below 50 %; this does not mean that the best is likely worse
		return text + fmt.Sprintf("not distinguishable from %s: chance gives %s such a gain in %.0f of 100 studies", originName(g.Origin), equal, 100*(1-c.Better))
	case g.Among > 1:
		return text + fmt.Sprintf("%s likely better; both corrected for choosing the best of %d", probability(c.Better), g.Among)
	}
	return text + probability(c.Better) + " likely better"
}

// unsureText says why the two capacities do not give a gain, or give one without an interval.
func unsureText(b Winner) string {
	best, reference := b.objective.Of(b.Found), b.Gain.reference
	whose := fmt.Sprintf("trial %d", b.Gain.Trial)
	switch {
	case reference.Limited != "":
		return "the load generator was late in " + whose + ", which carries at least about " + render.Number(reference.Rate) + " req/s"
	case best.PassedLate():
		return "the load generator was late in the best trial"
	case reference.Bound == capacity.AtMost:
		return fmt.Sprintf("%s failed at %s req/s and is not known to keep the SLO at any rate", whose, render.Number(reference.High))
	case reference.Bound == capacity.AtLeast && best.Bound == capacity.AtLeast:
		return "both capacities are lower bounds"
	case reference.Bound == capacity.AtLeast:
		return fmt.Sprintf("%s carries at least %s req/s and may carry more", whose, render.Number(reference.Rate))
	case best.Bound == capacity.AtLeast && !(reference.StdErr > 0):
		return fmt.Sprintf("the best passed %s req/s, and the capacity of %s has no interval", render.Number(best.Low), whose)
	case best.Bound == capacity.AtLeast:
		return fmt.Sprintf("the best passed up to %s req/s, and %s may carry up to %s", render.Number(best.Low), whose, render.Number(upper(reference)))
	case !(best.StdErr > 0):
		return "the capacity of the best has no interval"
	}
	return "the capacity of " + whose + " has no interval"
}

// probability writes a probability in per cent, and never as certain.
func probability(p float64) string {
	switch {
	case p > 0.999:
		return "over 99.9 %"
	case p < 0.001:
		return "under 0.1 %"
	}
	return fmt.Sprintf("%.3g %%", 100*p)
}
