package report

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
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

func percent(f float64) string         { return render.Percent(f) }
func span(d time.Duration) string      { return render.Span(d) }
func clip(text string, n int) string   { return render.Clip(text, n) }
func wrap(text string, n int) []string { return render.Wrap(text, n) }

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
	case c.Limited != "" && c.Low < c.Rate:
		return fmt.Sprintf("at least about %s%s, passed while the load generator was late (%s)", number(c.Rate), unit, c.Why)
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
	case t.Met() && t.Result.Class == serverctl.ClientLimited:
		return string(t.Result.Class)
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
	text := render.Done(s.Finished, s.Planned, "trial")
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
	say(s.Limited, "%d of them with a late load generator")
	say(s.Unmet, "%d not known to meet it at any rate")
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
