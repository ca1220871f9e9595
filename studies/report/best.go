package report

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/samber/lo"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// ErrNothingMet is returned by BestShell, BestEnv and BestYAML when no trial has met the SLO.
var ErrNothingMet = errors.New("no trial has met the SLO")

// Unmet says why a study has no winner: no trial has met the SLO, or none is finished yet.
func Unmet(study studies.Study) string {
	if slices.ContainsFunc(study.Trials, func(t studies.Trial) bool { return t.State == studies.Done }) {
		return ErrNothingMet.Error()
	}
	return "no trial is finished yet"
}

// BestText writes one sentence on what to do, the winning args with each flag on its own line, and the evidence. If no
// trial met the SLO, it says why and what can be done, and returns no error.
func BestText(w io.Writer, study studies.Study, o Options) error {
	l := lines{render.Text{Width: o.Width}}
	s := Summarize(study, o)
	if best, ok := Best(study); ok {
		l.addBest(best, study.State, o)
		l.addInsight(o.Insight)
		l.addCache(study, best.Trial)
		l.addOutdated(study, best)
	} else {
		if slices.Contains(l.nothingMet(study), study.Remedy) { // the remedy must not be printed twice
			study.Remedy = ""
		}
	}
	l.Item("study", "%s, %s", study.Name, stateText(study, s))
	l.Item("trials", "%s", countsText(s))
	l.addDropped(study)
	l.addPriors(study)
	l.addRestored(study)
	l.addGPUTime(study.Spent, s)
	l.addFront(study)
	return l.Flush(w)
}

// addBest adds the winner (the best trial) with its evidence.
func (l *lines) addBest(b Winner, state studies.State, o Options) {
	t, c := b.Trial, b.Capacity
	l.Paragraph(headline(b, state), "")
	l.Line("")
	for _, line := range flagLines(t.Args) {
		l.Line("%s", line)
	}
	if len(t.Args) == 0 {
		l.Line("(no args: the server's default)")
	}
	l.addEnvironment(t)
	l.Line("")
	l.Item("capacity", "%s", capacityText(c, t.Result.Facts.Simulated))
	if c.StdErr > 0 {
		l.Item("", "%s", bracketText(c))
	}
	l.addUnlessEmpty("", b.luckText())
	l.addUnlessEmpty("note", c.Doubt)
	l.addUnlessEmpty("per GPU", b.perGPUText())
	l.Item("in flight", "%s requests at capacity", render.Number(c.InFlight))
	if c.Binding != "" {
		l.Item("limit", "%s breaks first", c.Binding)
	}
	advice, advised := o.advice(b)
	low := func(p trial.Probe) bool { return p.Rate == c.Low && p.Verdict.Pass && p.Verdict.ClientLimited == "" }
	if i := slices.IndexFunc(t.Probes, low); i >= 0 && advice.ProbeRate != c.Low { // an advice for the rate c.Low already shows the values of this probe
		l.Item("", "at %s req/s: %s", render.Number(c.Low), trial.MeasuredText(trial.MeasuredLimits(t.Probes[i].Verdict)))
	}
	if advised {
		l.Item("advice", "%s", advice)
	}
	l.Item("gain", "%s", gainText(b))
	if b.Gain != nil {
		l.addUnlessEmpty("", b.Gain.Why)
	}
	l.addUnlessEmpty("", trustText(b))
	if t.Result.Facts.Simulated {
		l.Item("note", "simulated: no GPU is behind these figures")
	}
	for _, note := range notes(t) {
		l.Item("note", "%s", note)
	}
	if b.confirmed() {
		l.Item("trial", "%d, which confirms trial %d (%s) with fresh requests", t.Number, b.Found.Number, b.Found.Origin)
	} else {
		l.Item("trial", "%d (%s)", t.Number, t.Origin)
	}
}

// luckText says how much of the measured capacity is probably luck; "" if it is less than half a per cent.
func (b Winner) luckText() string {
	if b.Luck < 0.005 || b.Capacity.Rate == b.Trial.Result.Capacity.Rate {
		return ""
	}
	return fmt.Sprintf("%s less than measured, because the best of several is partly lucky", render.Share(1-math.Exp(-b.Luck)))
}

// addEnvironment adds the variables of a trial, each as NAME=value on a line of its own.
func (l *lines) addEnvironment(t studies.Trial) {
	set, left := assignments(t), unset(t)
	if len(set)+len(left) == 0 {
		return
	}
	l.Line("")
	l.Line("environment:")
	for _, line := range set {
		l.Line("%s", line)
	}
	if len(left) > 0 {
		l.Paragraph(fmt.Sprintf("(not set: %s)", strings.Join(left, ", ")), "  ")
	}
}

// addCache says whether the prefix cache was emptied before each probe, and which hit rate it had at the highest rate
// that passed. It adds nothing if the study does not say how it treats the cache.
func (l *lines) addCache(study studies.Study, t studies.Trial) {
	text := "carried from probe to probe"
	switch cmp.Or(t.Result.Cache, study.OldCache) {
	case "":
		return
	case trial.Reset:
		text = "emptied before each probe"
	}
	var at trial.Probe
	for _, p := range t.Probes {
		if p.Verdict.Pass && p.Rate >= at.Rate {
			at = p
		}
	}
	switch {
	case at.Rate == 0: // no probe passed
	case at.HitRate < 0:
		text += "; the server does not report its hit rate"
	case at.HitRate < 0.005:
		text += fmt.Sprintf("; at %s req/s it held none of the prompt tokens", render.Number(at.Rate))
	default:
		text += fmt.Sprintf("; at %s req/s it held %s of the prompt tokens", render.Number(at.Rate), render.Share(at.HitRate))
	}
	l.Item("cache", "%s", text)
}

// addRestored adds a note for each time the study was restored from a snapshot. The note says how much was lost.
func (l *lines) addRestored(study studies.Study) {
	for _, e := range study.Events {
		if e.Kind == studies.Restored {
			l.Item("note", "on %s the study was restored %s", e.Time.Local().Format(time.DateTime), e.Note)
		}
	}
}

// Outdated returns the notes on accepted changes of the world. There is one note for each change since the best trial
// was measured. There is one more if older trials are not compared with the best trial.
func Outdated(study studies.Study, best Winner) (lines []string) {
	for _, change := range changedSince(study, best) {
		lines = append(lines, fmt.Sprintf("trial %d was measured before an accepted change, and has not been measured again: %s", best.Trial.Number, change))
	}
	before := 0
	for _, e := range study.Changes() {
		if best.Trial.Number >= e.Trial {
			before = max(before, e.Trial)
		}
	}
	if before > 0 {
		lines = append(lines, fmt.Sprintf("the trials before trial %d are not compared with it: they were measured before a change that `--accept-drift` accepted", before))
	}
	return lines
}

// changedSince returns the changes that were accepted since the best trial was measured, each as one line.
func changedSince(study studies.Study, best Winner) (changes []string) {
	for _, e := range study.Changes() {
		if best.Trial.Number < e.Trial {
			changes = append(changes, e.Changes.Line())
		}
	}
	return changes
}

func (l *lines) addOutdated(study studies.Study, best Winner) {
	for _, note := range Outdated(study, best) {
		l.Item("note", "%s", note)
	}
}

// notes returns what a reader must know before believing a trial, each note once.
func notes(t studies.Trial) []string {
	all := slices.Clone(t.Result.Notes)
	for _, p := range t.Probes {
		if p.Note != "" {
			all = append(all, fmt.Sprintf("at %s req/s: %s", render.Number(p.Rate), p.Note))
		}
	}
	return lo.Uniq(all)
}

// nothingMet says why there is no winner: which trial came nearest, and why servers failed. It returns the remedies
// that it printed.
func (l *lines) nothingMet(study studies.Study) (remedies []string) {
	l.Line("%s", Unmet(study))
	l.Line("")
	if t, p, ok := nearest(study); ok {
		l.Item("nearest", "trial %d at %s req/s: %s", t.Number, render.Number(p.Rate), p.Verdict.Reason)
		if p.Measurement.Failed == 0 { // if requests failed, other limits would not help
			l.Item("try", "limits that this GPU can keep, or lower rates (probe.min_rate)")
		}
	}
	classes := Summarize(study, Options{}).Classes
	for _, class := range classNames(classes) {
		i := slices.IndexFunc(study.Trials, func(t studies.Trial) bool { return t.State == studies.Done && t.Result.Class == class })
		t := study.Trials[i]
		if t.Result.Outcome == trial.Dropped { // a dropped trial has not failed; the report lists it in an item of its own
			continue
		}
		l.Item("failed", "%d with %s; trial %d: %s", classes[class], class, t.Number, evidence(t))
		if remedy := serverctl.Remedy(class, t.Result.Cause); remedy != "" {
			l.Item("try", "%s", remedy)
			remedies = append(remedies, remedy)
		}
	}
	return remedies
}

// evidence returns the line of the log that shows why a server failed.
func evidence(t studies.Trial) string {
	return cmp.Or(message(t.Result.Evidence), "no line of the log shows why")
}

// nearest returns the failed probe with the most headroom, and its trial. Among equal probes, it returns the one at the
// lowest rate. A probe with a late load generator does not count.
func nearest(study studies.Study) (of studies.Trial, probe trial.Probe, found bool) {
	for _, t := range study.Trials {
		if !measured(t) {
			continue
		}
		for _, p := range t.Probes {
			h, most := p.Verdict.Headroom, probe.Verdict.Headroom
			if !p.Verdict.Pass && p.Verdict.ClientLimited == "" && (!found || h > most || h == most && p.Rate < probe.Rate) {
				of, probe, found = t, p, true
			}
		}
	}
	return of, probe, found
}

// A bestDocument is what BestJSON writes.
type bestDocument struct {
	Study    string        `json:"study"`
	ID       string        `json:"id"`
	State    studies.State `json:"state"`
	Note     string        `json:"note,omitempty"`
	Met      bool          `json:"met"` // whether any trial met the SLO; if not, best, gain and trust are absent
	Best     *bestTrial    `json:"best,omitempty"`
	Headline string        `json:"headline,omitempty"` // what to do, in one sentence
	Gain     *gain         `json:"gain,omitempty"`
	Trust    string        `json:"trust,omitempty"` // how sure the gain is, in words
	*Insight
	Summary Summary       `json:"trials"`
	Priors  []priorSource `json:"priors,omitempty"` // what was measured elsewhere
	Drifts  []driftItem   `json:"drifts,omitempty"` // accepted changes of the world, the oldest first

	Objective studies.Objective `json:"objective,omitempty"` // what gain compares; absent for the capacity of the server
	Front     []frontRow        `json:"front,omitempty"`     // Pareto front of capacity against GPUs; absent if all servers have the same number of GPUs
}

// A driftItem is an accepted change of the world. Trials before it are not compared with trials after it.
type driftItem struct {
	Time time.Time `json:"time"`
	Text string    `json:"text"` // one line for each fact that changed
}

func driftItems(study studies.Study) (items []driftItem) {
	for _, e := range study.Changes() {
		items = append(items, driftItem{e.Time, e.Text()})
	}
	return items
}

type bestTrial struct {
	Number    int               `json:"number"`
	Origin    studies.Origin    `json:"origin"`
	Point     space.Point       `json:"point"`
	Args      []string          `json:"args"`
	Env       map[string]string `json:"env,omitempty"`  // environment variables that the point sets
	Capacity  capacity.Capacity `json:"capacity"`       // Steps is left out, because Probes says more
	Luck      float64           `json:"luck,omitempty"` // what was taken off the measured capacity, in ln rate, because the best of several is partly lucky
	Advice    *trial.Advice     `json:"advice,omitempty"`
	Simulated bool              `json:"simulated"`
	Notes     []string          `json:"notes,omitempty"`
	Probes    []probeItem       `json:"probes"` // in the order in which they were run
}

// advice returns the request rate that is advised for a server with the winner's flags; false if no rate can be advised.
func (o Options) advice(b Winner) (trial.Advice, bool) {
	return trial.Advise(b.Capacity, cmp.Or(o.Margin, trial.DefaultMargin), b.Trial.Probes)
}

// BestJSON writes the winner with its evidence as one JSON object. If no trial met the SLO, met is false.
func BestJSON(w io.Writer, study studies.Study, o Options) error {
	return writeJSON(w, bestOf(study, o))
}

func bestOf(study studies.Study, o Options) bestDocument {
	d := bestDocument{
		Study: study.Name, ID: study.ID, State: study.State, Note: study.Explanation(), Summary: Summarize(study, o),
		Priors: priorSources(study), Drifts: driftItems(study), Objective: namedObjective(study), Front: frontOf(study),
	}
	best, ok := Best(study)
	if !ok {
		return d
	}
	t := best.Trial
	d.Met, d.Headline, d.Gain, d.Trust = true, headline(best, study.State), best.Gain, trustText(best)
	d.Insight = o.Insight
	d.Best = &bestTrial{
		Number: t.Number, Origin: t.Origin, Point: t.Point, Args: t.Args, Env: t.Point.Env(), Capacity: best.Capacity, Luck: best.Luck,
		Simulated: t.Result.Facts.Simulated, Notes: notes(t), Probes: probeItems(t.Probes),
	}
	d.Best.Capacity.Steps = nil
	if advice, ok := o.advice(best); ok {
		d.Best.Advice = &advice
	}
	return d
}

func writeJSON(w io.Writer, v any) error {
	if err := foreign.WriteJSON(w, v); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
