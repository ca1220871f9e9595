package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"regexp"
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

// defaultRows is the default number of trials in the status table: it fits a small terminal.
const defaultRows = 10

// StatusText writes how far a study is, the best trial so far, and a table of trials, within o.Width columns.
func StatusText(w io.Writer, study studies.Study, o Options) error {
	text := lines{render.Text{Width: o.Width}}
	s := Summarize(study, o)
	best, met := Best(study)
	text.Item("study", "%s%s, %s", study.Name, simulatedMark(s.Simulated), stateText(study, s))
	if d, ok := left(study, o); ok {
		text.Item("left", "about %s", render.Span(d))
	}
	if !o.Now.IsZero() {
		text.Item("stored", "%s ago", render.Span(max(0, o.Now.Sub(study.Updated))))
	}
	text.Item("trials", "%s", countsText(s))
	text.addGPUTime(study.Spent, s)
	text.addUnlessEmpty("starts", startsText(study.Trials))
	if met {
		text.Item("best", "trial %d: %s", best.Trial.Number, capacityText(best.Trial.Result.Capacity, best.Trial.Result.Facts.Simulated))
		text.addUnlessEmpty("note", best.Trial.Result.Capacity.Doubt)
		if advice, ok := o.advice(best); ok {
			text.Item("advice", "%s", advice)
		}
		text.addUnlessEmpty("per GPU", best.perGPUText())
		text.addOutdated(study, best)
		text.Item("gain", "%s", gainText(best))
		text.addUnlessEmpty("", trustText(best))
	} else {
		text.Item("best", "%s", Unmet(study))
	}
	text.addDropped(study)
	text.addPriors(study)
	text.addRestored(study)
	for _, t := range study.Trials {
		if t.State == studies.Running {
			text.Item(unfinishedText(study, "now"), "trial %d (%s), %s", t.Number, t.Origin, probesText(t.Probes))
		}
	}
	if len(study.Trials) > 0 {
		text.addTable(study, best, o)
	}
	out := lines{render.Text{Width: o.Width}}
	for line := range strings.Lines(text.String()) {
		out.Line("%s", render.Clip(strings.TrimRight(line, " \n"), out.Columns()))
	}
	return out.Flush(w)
}

// unfinishedText returns the text for an unfinished trial. If its study is running, this is the given text, and
// otherwise "half done".
func unfinishedText(study studies.Study, running string) string {
	if word, _ := StateOf(study); word != string(studies.Running) {
		return "half done"
	}
	return running
}

// startsText says how long the start of a server takes, and which part of it is the longest; "" if no server reported
// the parts.
func startsText(trials []studies.Trial) string {
	const newest = 1000 // this many of the newest trials are enough for medians
	starts := studies.StartsOf(trials[max(0, len(trials)-newest):])
	const minShown = 5 * time.Second
	if starts.Cold < minShown || len(starts.Parts) == 0 { // a start in virtual time has no parts
		return ""
	}
	text := render.Span(starts.Cold)
	if starts.Warm > 0 {
		text += fmt.Sprintf(", or %s with graphs from the compile cache", render.Span(starts.Warm))
	}
	longest := slices.MaxFunc(starts.Parts, func(a, b serverctl.Part) int { return cmp.Compare(a.Took, b.Took) })
	return fmt.Sprintf("%s; longest part: %s, %s", text, longest.Name, render.Span(longest.Took))
}

// probesText says how far the running trial is.
func probesText(probes []trial.Probe) string {
	if len(probes) == 0 {
		return "no probe yet"
	}
	last := probes[len(probes)-1]
	verdict := last.Verdict.Word()
	if last.Verdict.ClientLimited != "" {
		verdict = "was " + verdict
	}
	return fmt.Sprintf("%s; the last %s at %s req/s: %s", render.Count(len(probes), "probe"), verdict, render.Number(last.Rate), last.Verdict.Reason)
}

// addTable adds a table of trials. The best trial is always in it.
func (l *lines) addTable(study studies.Study, best Winner, o Options) {
	shown := rowsOf(study, best, o)
	short := render.ShortNames(searched(shown))
	t := render.Table{Columns: []render.Column{
		{Head: "#", Right: true}, {Head: "origin", Rank: 3}, {Head: "req/s", Right: true}, {Head: "vs best", Right: true, Rank: 2},
		{Head: "result", ShrinkTo: 10, Rank: 1}, {Head: "point", ShrinkTo: 24, Rank: 4},
	}}
	for _, trial := range shown {
		result := resultText(trial)
		if trial.State != studies.Done {
			result = unfinishedText(study, "running")
		}
		t.Rows = append(t.Rows, []string{fmt.Sprint(trial.Number), string(trial.Origin), shortCapacity(trial), against(trial, best), result, pointText(trial.Point, short)})
	}
	l.Line("")
	for _, line := range t.Lines(l.Columns()) {
		l.Line("%s", line)
	}
	if best.confirmed() {
		l.Paragraph(fmt.Sprintf("(vs best: confirmations against trial %d, all others against trial %d)", best.Trial.Number, best.Found.Number), " ")
	}
	if left := len(study.Trials) - len(shown); left > 0 {
		l.Line("(%s more: --all)", render.Count(left, "trial"))
	}
	points := len(t.Columns) - 1
	if len(short) > 0 && t.Shows(points, l.Columns()) { // a narrow table drops the points
		l.Line("")
		l.WriteString(render.Legend(short, l.Columns()))
	}
}

// rowsOf chooses and orders the rows of the table.
func rowsOf(study studies.Study, best Winner, o Options) []studies.Trial {
	all, objective := slices.Clone(study.Trials), study.DecidingObjective()
	switch o.Sort {
	case oldest:
	case fastest:
		slices.SortStableFunc(all, func(a, b studies.Trial) int { return cmp.Compare(rateOf(objective, b), rateOf(objective, a)) })
	default:
		slices.Reverse(all)
	}
	rows := cmp.Or(o.Rows, defaultRows)
	if len(all) <= rows {
		return all
	}
	i := slices.IndexFunc(all, func(t studies.Trial) bool { return t.Number == best.Trial.Number })
	if len(best.same) > 0 && i >= rows {
		all[rows-1] = all[i]
	}
	return all[:rows]
}

// rateOf returns the capacity by which trials are sorted; -1 for a trial without one.
func rateOf(o studies.Objective, t studies.Trial) float64 {
	switch c := o.Of(t); {
	case t.Met():
		return c.Carried()
	case c.Bound == capacity.Estimated:
		return c.Rate
	}
	return -1
}

// against says how a trial's capacity compares with the best, such as "-12 %"; "-" if the two cannot be compared.
func against(t studies.Trial, best Winner) string {
	switch {
	case !t.Met() && t.Result.Capacity.Bound != capacity.Estimated, !slices.ContainsFunc(best.same, func(o studies.Trial) bool { return o.Number == t.Number }): // trials of other worlds cannot be compared
		return "-"
	case t.Number == best.Trial.Number, t.Number == best.Found.Number:
		return "best"
	}
	is, than := best.objective.Of(t), best.objective.Of(best.Found)
	if t.Origin == studies.Confirmed {
		than = best.objective.Of(best.Trial)
	}
	change := is.Rate/than.Rate - 1
	switch {
	case is.Limited != "" || than.Bound == capacity.AtLeast && is.Bound == capacity.AtLeast || than.Limited != "":
		return "-"
	case is.Bound == capacity.AtLeast:
		return ">=" + render.ShortPercent(change)
	case than.Bound == capacity.AtLeast:
		return "<=" + render.ShortPercent(change)
	}
	return render.Percent(change)
}

// nothingSet stands for a point without flags.
const nothingSet = "(nothing set)"

// pointText writes a point with short names of its flags, such as "gmu=0.95 mns=128".
func pointText(p space.Point, short map[string]string) string {
	if len(p) == 0 {
		return nothingSet
	}
	set := make([]string, 0, len(p))
	for _, name := range slices.Sorted(maps.Keys(p)) {
		set = append(set, short[name]+"="+render.Clip(p[name], 12))
	}
	return strings.Join(set, " ")
}

// searched returns the flags that the trials set.
func searched(trials []studies.Trial) []string {
	return lo.Uniq(lo.FlatMap(trials, func(t studies.Trial, _ int) []string { return lo.Keys(t.Point) }))
}

// TrialLines sums up a finished trial for a log, in one line if the line fits. It writes each flag by its name in
// shortNames, and writes the mark after the point.
func TrialLines(t studies.Trial, shortNames map[string]string, mark string, width int) (all []string) {
	table := render.Table{
		Columns: []render.Column{{MinWidth: 8}, {MinWidth: 7}, {MinWidth: 12, Right: true}, {MinWidth: maxResult}, {Wraps: true, ShrinkTo: minPoint}},
		Rows: [][]string{{
			fmt.Sprintf("trial %2d", t.Number), string(t.Origin), shortCapacity(t) + " req/s", render.Clip(resultText(t), maxResult),
			pointText(t.Point, shortNames) + " " + mark,
		}},
	}
	all = table.Lines(width)
	if !slices.ContainsFunc(all, func(line string) bool { return render.Width(line) > width }) {
		return all
	}
	all = nil // the terminal is too narrow for columns
	text := render.Paragraph(strings.Join(table.Rows[0], " "), "  ", width)
	for line := range strings.Lines(text) {
		all = append(all, render.Clip(strings.TrimSuffix(line, "\n"), width))
	}
	return all
}

const (
	maxResult = 14                                 // width of a result in a line
	minPoint  = len("gmu=0.97 mnbt=16384 mns=512") // room for a typical point behind the other columns
)

// maxLastLines is how many of a dead server's last lines are shown. `tuner logs` shows the whole log.
const maxLastLines = 5

// LastWords says why a trial failed or was dropped. For a failed server it shows the log line that proves the cause,
// and the last lines of the log. It returns nil for a trial that was measured.
func LastWords(t studies.Trial, width int) []string {
	if t.State != studies.Done || measured(t) || t.Result.Class == serverctl.DroppedByRace { // the result of a trial that lost the race says everything
		return nil
	}
	if t.Result.Outcome == trial.Dropped {
		return render.Wrap(fmt.Sprintf("%s: %s", t.Result.Class, t.Result.Evidence), width)
	}
	tail := t.Result.Tail
	last := []string{fmt.Sprintf("%s: %s", serverctl.Words(t.Result.Class, t.Result.Cause), evidence(t))}
	for _, line := range tail[max(0, len(tail)-maxLastLines):] {
		if text := message(line); text != message(t.Result.Evidence) { // the first line already shows the evidence
			last = append(last, "| "+text)
		}
	}
	for i := range last {
		last[i] = render.Clip(last[i], width)
	}
	return last
}

// logPrefix matches the beginning of a line of vLLM's log: process, level, time, and place in the code.
var logPrefix = regexp.MustCompile(`^(?:\([A-Za-z0-9_]+ pid=\d+\) *)?(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) +\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?)?`)

// message returns a line of a server's log without its prefix. A line that is only a prefix stays as it is.
func message(line string) string {
	if text := strings.TrimSpace(logPrefix.ReplaceAllString(line, "")); text != "" {
		return text
	}
	return line
}

// A statusDocument is what StatusJSON writes.
type statusDocument struct {
	bestDocument
	Updated     time.Time   `json:"updated"`
	LeftSeconds *float64    `json:"left_seconds,omitempty"` // absent when unknown
	List        []trialItem `json:"list"`                   // all trials, by number
}

type trialItem struct {
	Number   int             `json:"number"`
	Origin   studies.Origin  `json:"origin"`
	Point    space.Point     `json:"point"`
	State    studies.State   `json:"state"`
	Outcome  trial.Outcome   `json:"outcome,omitempty"`
	Class    serverctl.Class `json:"class,omitempty"`
	Cause    serverctl.Cause `json:"cause,omitempty"`
	Evidence string          `json:"evidence,omitempty"`
	Capacity float64         `json:"capacity_rps,omitempty"` // see the field Bound
	Lowest   float64         `json:"lowest_rps,omitempty"`   // lower end of the 95 % interval of the capacity, if it has one
	Highest  float64         `json:"highest_rps,omitempty"`  // upper end of that interval
	StdErr   float64         `json:"std_err,omitempty"`      // standard error of ln(capacity)
	Doubt    string          `json:"doubt,omitempty"`        // what contradicts the capacity
	Bound    capacity.Bound  `json:"bound,omitempty"`
	Binding  string          `json:"binding,omitempty"`
	Probes   []probeItem     `json:"probes"`
}

type probeItem struct {
	Rate     float64 `json:"rate"`
	Pass     bool    `json:"pass"`
	Headroom float64 `json:"headroom"`
	Reason   string  `json:"reason"`
}

func probeItems(probes []trial.Probe) []probeItem {
	return lo.Map(probes, func(p trial.Probe, _ int) probeItem {
		return probeItem{p.Rate, p.Verdict.Pass, p.Verdict.Headroom, p.Verdict.Reason}
	})
}

// StatusJSON writes the content of StatusText, with all trials, as one JSON object.
func StatusJSON(w io.Writer, study studies.Study, o Options) error {
	return writeJSON(w, statusOf(study, o))
}

// StatusYAML writes StatusJSON's object as YAML.
func StatusYAML(w io.Writer, study studies.Study, o Options) error {
	text, err := foreign.YAML(statusOf(study, o))
	if err != nil {
		return fmt.Errorf("write the status as YAML: %w", err)
	}
	_, err = w.Write(text)
	return err
}

func statusOf(study studies.Study, o Options) statusDocument {
	d := statusDocument{bestDocument: bestOf(study, o), Updated: study.Updated, List: []trialItem{}}
	if s, ok := left(study, o); ok {
		d.LeftSeconds = new(s.Seconds())
	}
	for _, t := range study.Trials {
		r := t.Result
		c := r.Capacity
		d.List = append(d.List, trialItem{
			Number: t.Number, Origin: t.Origin, Point: t.Point, State: t.State, Outcome: r.Outcome, Class: r.Class, Cause: r.Cause,
			Evidence: r.Evidence, Capacity: c.Rate, Lowest: c.Lowest, Highest: c.Highest, StdErr: c.StdErr, Doubt: c.Doubt,
			Bound: c.Bound, Binding: c.Binding, Probes: probeItems(t.Probes),
		})
	}
	return d
}
