package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
	"vllmtuner/words"
)

// usualWidth is that of a terminal nobody has widened, and of a pipe.
const usualWidth = 80

// lines collects text and writes it at once, so that a failed write is one error.
type lines struct {
	strings.Builder
	width int // columns; 0 means usualWidth
}

func (l *lines) columns() int { return cmp.Or(l.width, usualWidth) }

func (l *lines) add(format string, args ...any) { fmt.Fprintf(l, format+"\n", args...) }

// item adds a named line, such as "capacity  2.71 req/s".
func (l *lines) item(name, format string, args ...any) {
	l.add("%-10s"+format, append([]any{name}, args...)...)
}

// wrapped adds a named line, broken between words where it is longer than there is room.
func (l *lines) wrapped(name, format string, args ...any) {
	for _, line := range wrap(fmt.Sprintf(format, args...), l.columns()-10) {
		l.item(name, "%s", line)
		name = ""
	}
}

func (l *lines) writeTo(w io.Writer) error {
	if _, err := io.WriteString(w, l.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

// number keeps three digits, without an exponent.
func number(f float64) string {
	if f >= 1000 || f <= -1000 {
		return fmt.Sprintf("%.0f", f)
	}
	return fmt.Sprintf("%.3g", f)
}

func percent(f float64) string         { return words.Percent(f) }
func span(d time.Duration) string      { return words.Span(d) }
func clip(text string, n int) string   { return words.Clip(text, n) }
func wrap(text string, n int) []string { return words.Wrap(text, n) }

// simulatedMark follows every figure that no GPU is behind.
func simulatedMark(simulated bool) string {
	if simulated {
		return " simulated"
	}
	return ""
}

// capacityText writes a capacity with its interval, such as "2.71 req/s, 95 %: 2.52 to 2.91", or else with its bracket, such as
// "2.71 req/s (passed 2.62, failed 2.85)".
func capacityText(c capacity.Capacity, simulated bool) string {
	unit := " req/s" + simulatedMark(simulated)
	switch {
	case c.Bound == capacity.AtLeast:
		return fmt.Sprintf("at least %s%s (%s)", number(c.Rate), unit, c.Why)
	case c.Bound == capacity.AtMost:
		return fmt.Sprintf("none: failed at %s%s", number(c.High), unit)
	case c.StdErr > 0:
		return fmt.Sprintf("%s%s, 95 %%: %s to %s", number(c.Rate), unit, number(c.Lowest), number(c.Highest))
	}
	return fmt.Sprintf("%s%s (%s)", number(c.Rate), unit, bracketText(c))
}

// bracketText names the nearest rates that were measured about a capacity.
func bracketText(c capacity.Capacity) string {
	return fmt.Sprintf("passed %s, failed %s", number(c.Low), number(c.High))
}

// shortCapacity writes a capacity in one word, such as ">=2.71", or "-" when there is none.
func shortCapacity(t studies.Trial) string {
	if !t.Met() {
		return "-"
	}
	if t.Result.Capacity.Bound == capacity.AtLeast {
		return ">=" + number(t.Result.Capacity.Rate)
	}
	return number(t.Result.Capacity.Rate)
}

// resultText says in a few words what a trial came to: the limit that binds, the one that broke at the lowest rate, or how
// the server failed.
func resultText(t studies.Trial) string {
	switch {
	case t.State != studies.Done:
		return "running"
	case t.Met():
		return t.Result.Capacity.Binding
	case measured(t):
		return fmt.Sprintf("%s at %s", t.Result.Capacity.Binding, number(t.Result.Capacity.High))
	}
	if t.Result.Class == serverctl.AcceptanceNearZero { // whose name does not fit a column
		return "drafts refused"
	}
	return string(t.Result.Class)
}

// dropped says of which trials the measuring ended early, and why: the newest of each class, in full.
func (l *lines) dropped(study studies.Study) {
	newest := map[serverctl.Class]studies.Trial{}
	for _, t := range study.Trials {
		if t.State == studies.Done && t.Result.Outcome == trial.Dropped {
			newest[t.Result.Class] = t
		}
	}
	for _, class := range slices.Sorted(maps.Keys(newest)) {
		t := newest[class]
		l.wrapped("dropped", "trial %d (%s): %s", t.Number, class, t.Result.Evidence)
	}
}

// whose names the point of an origin.
func whose(o studies.Origin) string {
	switch o {
	case studies.Default:
		return "the default"
	case studies.Current:
		return "the current args"
	}
	return "the first that could be measured"
}

// gainText says what the best trial brings.
func gainText(b Winner) string {
	g := b.Gain
	if g == nil {
		return "not known: the default has not been measured yet"
	}
	reference := fmt.Sprintf("trial %d, %s", g.Trial, whose(g.Origin))
	if g.reference.Met() {
		reference += fmt.Sprintf(" (%s req/s)", number(g.reference.Rate))
	}
	switch {
	case g.Trial == b.Trial.Number:
		return fmt.Sprintf("none: it is %s itself", reference)
	case g.Bound == "":
		return fmt.Sprintf("not known: both its capacity and that of %s are lower bounds", reference)
	case g.reference.Bound == capacity.AtMost:
		return fmt.Sprintf("at least %s over %s, which fails at %s req/s", percent(g.Ratio), reference, number(g.reference.High))
	case g.Bound == capacity.Exact:
		return fmt.Sprintf("%s over %s", percent(g.Ratio), reference)
	}
	return fmt.Sprintf("%s %s over %s", g.Bound, percent(g.Ratio), reference)
}

// trustText says how sure the gain is; "" when there is none that could be.
func trustText(b Winner) string {
	g := b.Gain
	if g == nil || g.Bound == "" || g.Trial == b.Trial.Number {
		return ""
	}
	c := g.Comparison
	if c == nil {
		return "how sure the gain is cannot be told: " + unsureText(b)
	}
	text := fmt.Sprintf("95 %%: %s to %s; P(better) %s", percent(c.Lowest-1), percent(c.Highest-1), probability(c.Better))
	if !g.Distinguishable {
		return text + ", not distinguishable from " + whose(g.Origin)
	}
	if b.Among > 2 { // the best of many measured ones is not the best of many
		text += fmt.Sprintf(", were it not chosen among %d, which flatters it", b.Among)
	}
	return text
}

// unsureText says which capacity has no interval.
func unsureText(b Winner) string {
	for _, one := range []struct {
		whose    string
		capacity capacity.Capacity
	}{{"the best", b.Trial.Result.Capacity}, {fmt.Sprintf("trial %d", b.Gain.Trial), b.Gain.reference}} {
		switch {
		case one.capacity.Bound != capacity.Exact:
			return "the capacity of " + one.whose + " is a bound"
		case !(one.capacity.StdErr > 0):
			return "the capacity of " + one.whose + " has no interval"
		}
	}
	return "both have an interval"
}

// probability writes one in per cent, and never as certain.
func probability(p float64) string {
	switch {
	case p > 0.999:
		return "over 99.9 %"
	case p < 0.001:
		return "under 0.1 %"
	}
	return fmt.Sprintf("%.3g %%", 100*p)
}

// silent is said of a study on a shared disk whose owner may be dead.
const silent = "silent"

// StateOf says in a word how far a study is, and why, if there is more to say. A study whose owner shows no sign of life is not called running.
func StateOf(study studies.Study) (word, why string) {
	switch {
	case study.State == studies.Running && study.Unseen != "":
		return "unknown", "it was running when it was published, and whether its owner lives cannot be seen: " + study.Unseen
	case study.State == studies.Running && study.Life.Doubtful():
		return silent, fmt.Sprintf("silent for %s; its owner may be gone", span(study.Life.Silent))
	case study.State == studies.Stopped && study.Life.Gone && study.Note == "":
		return string(study.State), "its owner is gone; `tuner run` goes on"
	}
	return string(study.State), study.Note
}

// stateText says how far the study is, such as "running: 12 of 30 trials done".
func stateText(study studies.Study, s Summary) string {
	word, why := StateOf(study)
	text := words.Done(s.Finished, s.Planned, "trial")
	switch {
	case word == silent:
		return why + ": " + text
	case study.State != studies.Done:
		text = word + ": " + text
	case s.Finished < s.Planned:
		text = "ended: " + text
	}
	if why != "" {
		text += ", " + why
	}
	return text
}

// countsText says what became of the trials.
func countsText(s Summary) string {
	var counts []string
	say := func(n int, format string) {
		if n > 0 {
			counts = append(counts, fmt.Sprintf(format, n))
		}
	}
	say(s.Met, "%d met the SLO")
	say(s.Unmet, "%d failed at every rate")
	say(s.Dropped, "%d dropped")
	say(s.Infeasible, "%d infeasible")
	say(s.Unknown, "%d unknown")
	if len(counts) == 0 {
		return "none finished"
	}
	text := strings.Join(counts, ", ")
	var classes []string
	for _, c := range classNames(s.Classes) {
		classes = append(classes, fmt.Sprintf("%s %d", c, s.Classes[c]))
	}
	if len(classes) > 0 {
		text += " (" + strings.Join(classes, ", ") + ")"
	}
	return text
}
