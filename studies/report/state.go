package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/render"
	"vllmtuner/serverctl"
	"vllmtuner/studies"
	"vllmtuner/trial"
	"vllmtuner/trial/capacity"
)

// lines are the lines of a report about a study.
type lines struct{ render.Text }

// addUnlessEmpty adds an item, unless its text is empty.
func (l *lines) addUnlessEmpty(name, text string) {
	if text != "" {
		l.Item(name, "%s", text)
	}
}

// simulatedMark returns the mark that follows every figure of a simulated server.
func simulatedMark(simulated bool) string {
	if simulated {
		return " simulated"
	}
	return ""
}

// capacityText writes a capacity with its interval, such as "2.71 req/s, 95 %: 2.52 to 2.91". Without an interval it
// writes the bracket, as in "2.71 req/s (passed 2.62, failed 2.85)".
func capacityText(c capacity.Capacity, simulated bool) string {
	unit := "req/s" + simulatedMark(simulated)
	text := c.RateText(unit, render.Number)
	switch {
	case c.PassedLate():
		return fmt.Sprintf("%s: it passed while the load generator was late (%s)", text, c.Why)
	case c.Bound == capacity.AtLeast:
		return fmt.Sprintf("%s (%s)", text, c.Why)
	case c.Bound == capacity.AtMost:
		return fmt.Sprintf("none: failed at %s %s", render.Number(c.High), unit)
	case c.Bound == capacity.Estimated || c.StdErr > 0:
		return text
	}
	return fmt.Sprintf("%s (%s)", text, bracketText(c))
}

// bracketText names the measured rates just below and just above a capacity.
func bracketText(c capacity.Capacity) string {
	return fmt.Sprintf("passed %s, failed %s", render.Number(c.Low), render.Number(c.High))
}

// shortCapacity writes a capacity in one word, such as ">=2.71", or "-" when there is none.
func shortCapacity(t studies.Trial) string {
	if !t.Met() && t.Result.Capacity.Bound != capacity.Estimated {
		return "-"
	}
	return rateText(t.Result.Capacity.Rate, t.Result.Capacity.Bound)
}

func rateText(rate float64, bound capacity.Bound) string {
	switch bound {
	case capacity.AtLeast:
		return ">=" + render.Number(rate)
	case capacity.Estimated:
		return "~" + render.Number(rate)
	}
	return render.Number(rate)
}

// resultText says in a few words how a trial ended. It names the limit that breaks first, or the limit that broke at
// the lowest rate, or the server's failure.
func resultText(t studies.Trial) string {
	switch {
	case t.State != studies.Done:
		return "running"
	case t.Met() && t.Result.Class == serverctl.ClientLimited:
		return string(t.Result.Class)
	case t.Met():
		return t.Result.Capacity.Binding
	case measured(t):
		return fmt.Sprintf("%s at %s", t.Result.Capacity.Binding, render.Number(t.Result.Capacity.High))
	}
	switch t.Result.Class { // the names of the classes are too wide for the column
	case serverctl.AcceptanceNearZero:
		return "drafts refused"
	case serverctl.DroppedByRace:
		return "lost the race"
	}
	return string(t.Result.Class)
}

// addDropped says which trials were dropped, and why. It shows the newest trial of each class.
func (l *lines) addDropped(study studies.Study) {
	dropped := lo.Filter(study.Trials, func(t studies.Trial, _ int) bool {
		return t.State == studies.Done && t.Result.Outcome == trial.Dropped && t.Result.Class != serverctl.DroppedByRace
	})
	newest := lo.KeyBy(dropped, func(t studies.Trial) serverctl.Class { return t.Result.Class })
	for _, class := range slices.Sorted(maps.Keys(newest)) {
		t := newest[class]
		l.Item("dropped", "trial %d (%s): %s", t.Number, class, t.Result.Evidence)
	}
}

// silent is the state of a study on a shared disk whose owner may be dead.
const silent = "silent"

// StateOf returns the state of a study as one word, and the reason if there is one. It does not call a study running if
// its owner shows no sign of life.
func StateOf(study studies.Study) (word, why string) {
	switch {
	case study.State == studies.Running && study.Unseen != "":
		return "unknown", "it was running when it was last published; it is not known whether it still runs: " + study.Unseen
	case study.State == studies.Running && study.Life.Doubtful():
		return silent, fmt.Sprintf("silent for %s; its owner may be gone", render.Span(study.Life.Silent))
	case study.State == studies.Stopped && study.Life.Gone && study.Note == "":
		return string(study.State), "its owner is gone; `tuner run` continues it"
	}
	return string(study.State), study.Explanation()
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

// countsText counts the trials by how they ended.
func countsText(s Summary) string {
	var counts []string
	say := func(n int, format string) {
		if n > 0 {
			counts = append(counts, fmt.Sprintf(format, n))
		}
	}
	say(s.Met, "%d met the SLO")
	say(s.Limited, "%d of them with a late load generator")
	say(s.Unmet, "%d not known to meet the SLO at any rate")
	raced := s.Classes[serverctl.DroppedByRace]
	say(raced, "%d lost the race")
	say(s.Dropped-raced, "%d dropped")
	say(s.Infeasible, "%d infeasible")
	say(s.Unknown, "%d unknown")
	if len(counts) == 0 {
		return "none finished"
	}
	text := strings.Join(counts, ", ")
	var classes []string
	for _, c := range classNames(s.Classes) {
		if c == serverctl.DroppedByRace {
			continue
		}
		classes = append(classes, fmt.Sprintf("%s %d", c, s.Classes[c]))
	}
	if len(classes) > 0 {
		text += " (" + strings.Join(classes, ", ") + ")"
	}
	return text
}
