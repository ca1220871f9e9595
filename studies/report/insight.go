package report

import (
	"fmt"
	"strings"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// An Insight says what a study knows besides its best trial. Mattered and Flat are expectations of a model of the
// trials, not measurements. tuner/insight computes them.
type Insight struct {
	Mattered *Mattered `json:"mattered,omitempty"`
	Flat     *Flat     `json:"flat,omitempty"`
	Nearly   *Nearly   `json:"nearly_as_good,omitempty"` // nil if no simpler trial is nearly as good
}

// Mattered says for each searched flag how much of the variation of ln(capacity) over the space the flag explains.
type Mattered struct {
	Unknown   string      `json:"unknown,omitempty"` // why that is not known; "" if it is known
	Trials    int         `json:"trials"`            // number of trials with a capacity, or with a bound of it
	Variation float64     `json:"variation"`         // standard deviation of ln(capacity) over the space; 0 if there is no model
	Flags     []FlagShare `json:"flags,omitempty"`   // the largest share first
}

// A FlagShare is the fraction of the variation that one flag explains. The shares of all flags sum to 1.
type FlagShare struct {
	Flag    string  `json:"flag"`
	Share   float64 `json:"share"`   // mean of First and Total, so that an interaction of two flags counts half for each of them
	Lowest  float64 `json:"lowest"`  // ends of the 95 % interval of Share
	Highest float64 `json:"highest"` // see Lowest
	First   float64 `json:"first"`   // what the flag explains alone: its first-order Sobol index
	Total   float64 `json:"total"`   // the same with its interactions: its total Sobol index
	Known   float64 `json:"known"`   // fraction of the flag's effect that the model knows
	Matters bool    `json:"matters"` // the share is known to be more than a little
}

// Flat says in which region around the best flags the capacity is expected to be nearly the same.
type Flat struct {
	Within float64    `json:"within"` // largest loss of capacity in the region, such as 0.02
	Sure   float64    `json:"sure"`   // lowest probability, for each value in the region, that the loss is not larger than Within
	Flags  []FlatFlag `json:"flags"`  // flags with more than one value in the region, in the order of the study file
}

// A FlatFlag has the values that one flag may have if all other flags are as in the best trial.
type FlatFlag struct {
	Flag    string   `json:"flag"`
	Best    string   `json:"best"`             // value in the best trial
	Lowest  string   `json:"lowest,omitempty"` // ends of the region of a number
	Highest string   `json:"highest,omitempty"`
	Values  []string `json:"values,omitempty"` // values of a flag with choices, the best one included
	Part    float64  `json:"part"`             // fraction of the flag's range, on the scale of the search, or of its values; 1 means all of them
}

// Nearly is a measured trial. It is the nearest one to the default among the trials that are nearly as good as the
// best.
type Nearly struct {
	Trial     int            `json:"trial"`
	Origin    studies.Origin `json:"origin"`
	Args      []string       `json:"args"`            // args that differ from the default
	Changes   int            `json:"changes"`         // number of searched flags and variables whose value differs from the default
	Best      int            `json:"changes_of_best"` // the same number for the best trial
	Rate      float64        `json:"rate"`            // capacity of the trial, requests per second
	Estimated bool           `json:"estimated"`       // the trial lost the race, so the capacity is an estimate
	Ratio     float64        `json:"ratio"`           // capacity / capacity of the best, both measured with the same requests
	Within    float64        `json:"within"`          // loss of capacity that counts as nearly as good, such as 0.01
	Probable  float64        `json:"p_within"`        // probability that the loss is not larger

	Env map[string]string `json:"env,omitempty"` // environment variables that differ from the default
}

// addInsight adds what the study knows besides its best trial.
func (l *lines) addInsight(i *Insight) {
	for _, line := range i.texts() {
		l.Item(line.name, "%s", line.text)
	}
}

// A named is a text under a name.
type named struct{ name, text string }

// texts returns at most one line for each part of the insight. It returns none for a part about which nothing is known.
func (i *Insight) texts() (all []named) {
	if i == nil {
		return nil
	}
	for _, one := range []named{{"mattered", i.Mattered.text()}, {"flat", i.Flat.text()}, {"nearly", i.Nearly.text()}} {
		if one.text != "" {
			all = append(all, one)
		}
	}
	return all
}

// shownFlags is how many flags a line names.
const shownFlags = 4

// list joins words, and counts those that a line has no room for.
func list(words []string) string {
	if n := len(words) - shownFlags; n > 0 {
		words = append(words[:shownFlags:shownFlags], fmt.Sprintf("%d more", n))
	}
	return strings.Join(words, ", ")
}

func (m *Mattered) text() string {
	if m == nil || len(m.Flags) == 0 {
		return ""
	}
	if m.Unknown != "" {
		return "not known: " + m.Unknown
	}
	var words []string
	for _, f := range m.Flags {
		if f.Matters {
			interval := "(95 %: "
			if len(words) > 0 {
				interval = "("
			}
			words = append(words, fmt.Sprintf("%s %.0f %% %s%.0f to %.0f %%)", f.Flag, 100*f.Share, interval, 100*f.Lowest, 100*f.Highest))
		}
	}
	return list(words) + " of the variation"
}

// shownPart is the smallest fraction of a flag's range that a report mentions.
const shownPart = 0.05

func (f *Flat) text() string {
	if f == nil {
		return ""
	}
	var words []string
	for _, flag := range f.Flags {
		switch {
		case flag.Part < shownPart:
		case flag.Part >= 1 && len(flag.Values) != 2:
			words = append(words, "any "+flag.Flag)
		case flag.Values != nil:
			words = append(words, flag.Flag+" "+strings.Join(flag.Values, " or "))
		default:
			words = append(words, fmt.Sprintf("%s %s to %s", flag.Flag, flag.Lowest, flag.Highest))
		}
	}
	if len(words) == 0 {
		return ""
	}
	text := fmt.Sprintf("%s: %s likely within %.0f %% of the best", list(words), render.Share(f.Sure), 100*f.Within)
	if len(words) > 1 {
		text += ", each alone"
	}
	return text
}

func (n *Nearly) text() string {
	if n == nil {
		return ""
	}
	rate := render.Number(n.Rate)
	if n.Estimated {
		rate = "~" + rate
	}
	return fmt.Sprintf("trial %d, %s (%s req/s, %s as measured)", n.Trial, n.sets(), rate, render.Percent(n.Ratio-1))
}

// sets says which flags the trial sets.
func (n *Nearly) sets() string {
	flags := strings.Join(append(space.EnvWords(n.Env), flagLines(n.Args)...), " ")
	switch {
	case n.Changes == 0:
		return "which sets nothing"
	case n.Changes < n.Best:
		return "which sets only " + flags
	}
	return "nearer to the default: " + flags
}
