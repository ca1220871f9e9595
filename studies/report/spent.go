package report

import (
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/trial"
)

// partNames has a name for people for each part of a study's time.
var partNames = map[trial.Part]string{
	trial.Starting: "starts", trial.WarmingUp: "warm-up", trial.Priming: "priming", trial.Emptying: "cache resets",
	trial.LeadIn: "lead-in", trial.Windows: "windows", trial.RunOut: "run-out", trial.WorstLoad: "worst case", trial.Idling: "idle",
	trial.Stopping: "stops", trial.Releasing: "waiting for GPU memory", trial.Lost: "lost",
	trial.Predicting: "predicting", trial.Choosing: "choosing",
}

// inSeconds returns the time of each part in seconds; nil if no part is known.
func inSeconds(spent trial.Spent) map[trial.Part]float64 {
	if len(spent) == 0 {
		return nil
	}
	parts := make(map[trial.Part]float64, len(spent))
	for part, d := range spent {
		parts[part] = d.Seconds()
	}
	return parts
}

// addGPUTime adds the study's GPU time with its parts, and the time without a server.
func (l *lines) addGPUTime(spent trial.Spent, s Summary) {
	total, itemised := studies.Seconds(s.GPUSeconds), spent.GPU()
	text := partsText(spent, trial.Part.OnGPU)
	switch older := total - itemised; {
	case itemised == 0:
	case older > total/100: // an older tuner measured the study's first trials
		text += ", not itemised " + render.Span(older)
	default:
		total = itemised
	}
	if text != "" {
		text = ": " + text
	}
	l.Item("GPU time", "%s%s%s", render.Span(total), simulatedMark(s.Simulated), text)
	if beside := spent.Sum() - itemised; beside >= time.Second {
		l.Item("", "and %s without a server: %s", render.Span(beside), partsText(spent, func(p trial.Part) bool { return !p.OnGPU() }))
	}
}

// partsText lists the selected parts, such as "starts 40 min, windows 1 h 28 min". It adds up all parts that are less
// than a hundredth of the sum. If the sum is at least an hour, it rounds parts of a minute or more to minutes.
func partsText(spent trial.Spent, selects func(trial.Part) bool) string {
	var all, others time.Duration
	for part, d := range spent {
		if selects(part) {
			all += d
		}
	}
	var texts []string
	add := func(name string, d time.Duration) {
		if all >= time.Hour && d >= time.Minute {
			d = d.Round(time.Minute)
		}
		texts = append(texts, name+" "+render.Span(d))
	}
	for _, part := range trial.Parts {
		switch d := spent[part]; {
		case !selects(part) || d <= 0:
		case d < all/100:
			others += d
		default:
			add(partNames[part], d)
		}
	}
	if others >= time.Second {
		add("other", others)
	}
	return strings.Join(texts, ", ")
}
