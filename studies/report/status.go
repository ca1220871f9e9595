package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"vllmtuner/foreign"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/tuner/space"
)

// manyRows is how many trials the status table shows unless told: what fits a small terminal.
const manyRows = 10

// StatusText writes how far a study is, what is best so far, and the newest trials, within 80 columns.
func StatusText(w io.Writer, study studies.Study, o Options) error {
	var text lines
	s := Summarize(study, o)
	best, met := Best(study)
	text.item("study", "%s%s, %s", study.Name, simulatedMark(s.Simulated), stateText(study, s))
	if d, ok := left(study, o); ok {
		text.item("left", "about %s", span(d))
	}
	if !o.Now.IsZero() {
		text.item("stored", "%s ago", span(max(0, o.Now.Sub(study.Updated))))
	}
	text.wrapped("trials", "%s", countsText(s))
	text.item("GPU time", "%s%s", span(seconds(s.GPUSeconds)), simulatedMark(s.Simulated))
	if starts := startsText(study.Trials); starts != "" {
		text.wrapped("starts", "%s", starts)
	}
	if met {
		text.wrapped("best", "trial %d: %s", best.Trial.Number, capacityText(best.Trial.Result.Capacity, best.Trial.Result.Facts.Simulated))
		if doubt := best.Trial.Result.Capacity.Doubt; doubt != "" {
			text.wrapped("note", "%s", doubt)
		}
		if advice, ok := o.advice(best.Trial); ok {
			text.wrapped("advice", "%s", advice)
		}
		text.outdated(study, best)
		text.wrapped("gain", "%s", gainText(best))
		if trust := trustText(best); trust != "" {
			text.wrapped("", "%s", trust)
		}
	} else {
		text.item("best", "%s", ErrNothingMet)
	}
	text.dropped(study)
	text.priors(study)
	text.restored(study)
	for _, t := range study.Trials {
		if t.State == studies.Running {
			text.wrapped("now", "trial %d (%s), %s", t.Number, t.Origin, probesText(t.Probes))
		}
	}
	if len(study.Trials) > 0 {
		text.table(study.Trials, best, o.Rows)
	}
	var out lines
	for line := range strings.Lines(text.String()) {
		out.add("%s", clip(strings.TrimRight(line, " \n"), width))
	}
	return out.writeTo(w)
}

// startsText says what the starts cost and what the most of it went into; "" where no server told.
func startsText(trials []studies.Trial) string {
	const enough = 1000 // newest ones, for medians
	starts := studies.StartsOf(trials[max(0, len(trials)-enough):])
	parts := starts.Parts()
	const worthAWord = 5 * time.Second
	if starts.Cold() < worthAWord || len(parts) == 0 { // a start in virtual time has no parts
		return ""
	}
	text := span(starts.Cold())
	if warm := starts.Warm(); warm > 0 {
		text += fmt.Sprintf(", %s where graphs were compiled before", span(warm))
	}
	longest := slices.MaxFunc(parts, func(a, b serverctl.Part) int { return cmp.Compare(a.Took, b.Took) })
	return fmt.Sprintf("%s; the most for %s: %s", text, longest.Name, span(longest.Took))
}

// probesText says how far the running trial is.
func probesText(probes []trial.Probe) string {
	if len(probes) == 0 {
		return "no probe yet"
	}
	last, verdict := probes[len(probes)-1], "passed"
	if !last.Verdict.Pass {
		verdict = "failed"
	}
	return fmt.Sprintf("%d probes, %s %s req/s: %s", len(probes), verdict, number(last.Rate), last.Verdict.Reason)
}

// table adds the newest trials, the newest first.
func (l *lines) table(trials []studies.Trial, best Winner, rows int) {
	if rows == 0 {
		rows = manyRows
	}
	newest := slices.Clone(trials[max(0, len(trials)-rows):])
	slices.Reverse(newest)
	short := ShortNames(searched(newest))
	l.add("")
	l.add("%4s  %-7s  %7s  %7s  %-16s  %s", "#", "origin", "req/s", "vs best", "result", "point")
	for _, t := range newest {
		l.add("%4d  %-7s  %7s  %7s  %-16s  %s", t.Number, t.Origin, shortCapacity(t), against(t, best),
			clip(resultText(t), 16), pointText(t.Point, short))
	}
	if len(short) > 0 {
		l.add("")
		l.legend(short)
	}
}

// legend adds what the short names stand for.
func (l *lines) legend(short map[string]string) {
	line := ""
	for _, name := range slices.SortedFunc(maps.Keys(short), func(a, b string) int { return strings.Compare(short[a], short[b]) }) {
		word := short[name] + " " + name
		switch {
		case line == "":
			line = word
		case len(line)+len(word)+3 > width:
			l.add("%s,", line)
			line = word
		default:
			line += ", " + word
		}
	}
	l.add("%s", line)
}

// against compares a trial with the best one, such as "-12 %".
func against(t studies.Trial, best Winner) string {
	switch {
	case !t.Met(), !slices.ContainsFunc(best.same, func(o studies.Trial) bool { return o.Number == t.Number }): // which would be measured otherwise now
		return "-"
	case t.Number == best.Trial.Number:
		return "best"
	}
	return percent(t.Result.Capacity.Rate/best.Trial.Result.Capacity.Rate - 1)
}

// ShortNames gives each flag a short name, its initials, so that points fit a line. Flags with the same initials are told
// apart by a number.
func ShortNames(names []string) map[string]string {
	short, taken := map[string]string{}, map[string]int{}
	for _, name := range slices.Sorted(slices.Values(names)) {
		initials := ""
		for word := range strings.FieldsFuncSeq(name, func(r rune) bool { return r == '-' || r == '_' }) {
			initials += word[:1]
		}
		taken[initials]++
		if n := taken[initials]; n > 1 {
			initials += fmt.Sprint(n)
		}
		short[name] = initials
	}
	return short
}

// pointText writes a point with short names, such as "gmu=0.95 mns=128".
func pointText(p space.Point, short map[string]string) string {
	if len(p) == 0 {
		return "(nothing set)"
	}
	words := make([]string, 0, len(p))
	for _, name := range slices.Sorted(maps.Keys(p)) {
		words = append(words, short[name]+"="+clip(p[name], 12))
	}
	return strings.Join(words, " ")
}

// searched returns the flags that the trials set.
func searched(trials []studies.Trial) []string {
	names := map[string]bool{}
	for _, t := range trials {
		for name := range t.Point {
			names[name] = true
		}
	}
	return slices.Collect(maps.Keys(names))
}

// TrialLine sums a finished trial up in one line, for a log. short names its flags.
func TrialLine(t studies.Trial, short map[string]string) string {
	return fmt.Sprintf("trial %2d  %-7s  %6s req/s  %-14s  %s", t.Number, t.Origin, shortCapacity(t), clip(resultText(t), 14), pointText(t.Point, short))
}

// mostWords is how many of a dead server's last lines are shown; its whole log is a file.
const mostWords = 5

// LastWords says why a trial's server failed: the line that gave its class, and the last lines of its log; and why a trial was
// dropped. A trial that was measured has none.
func LastWords(t studies.Trial) []string {
	if t.State != studies.Done || measured(t) {
		return nil
	}
	if t.Result.Outcome == trial.Dropped {
		return wrap(fmt.Sprintf("%s: %s", t.Result.Class, t.Result.Evidence), width-10)
	}
	tail := t.Result.Tail
	what := string(t.Result.Class)
	if cause := t.Result.Cause; cause != "" {
		what += fmt.Sprintf(" (%s)", cause)
	}
	words := []string{fmt.Sprintf("%s: %s", what, t.Result.Evidence)}
	for _, line := range tail[max(0, len(tail)-mostWords):] {
		words = append(words, "| "+line)
	}
	for i := range words {
		words[i] = clip(words[i], width-10)
	}
	return words
}

// Legend says what short names stand for, a few a line.
func Legend(short map[string]string) string {
	var text lines
	text.legend(short)
	return text.String()
}

// A statusDocument is StatusJSON's output.
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
	Capacity float64         `json:"capacity_rps,omitempty"` // see bound
	Lowest   float64         `json:"lowest_rps,omitempty"`   // 95 % interval of the capacity; absent where none is known
	Highest  float64         `json:"highest_rps,omitempty"`  // likewise
	StdErr   float64         `json:"std_err,omitempty"`      // of ln capacity
	Doubt    string          `json:"doubt,omitempty"`        // what speaks against the capacity
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
	items := []probeItem{}
	for _, p := range probes {
		items = append(items, probeItem{p.Rate, p.Verdict.Pass, p.Verdict.Headroom, p.Verdict.Reason})
	}
	return items
}

// StatusJSON writes what StatusText says, with all trials, as one JSON object.
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
