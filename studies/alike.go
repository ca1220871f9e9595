package studies

import (
	"regexp"
	"slices"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// SameWords is how many of a study's first servers must die of the same words before these are the machine's: the default, the
// user's own args and a point of the search have hardly a flag in common.
const SameWords = 3

// Counts reports whether a trial says something of its point. It does not when the study's first servers all died with the same
// words, whatever their flags: then the machine or the server's command was broken, and the point is to be tried again.
func (t Trial) Counts() bool { return t.Result.Cause != serverctl.SameWords }

// discountAlikeDeaths finds the first trials that all died alike. What is stored of them stays as it is, so that it is found in studies of
// older tuners too; whoever reads the study sees that nothing is known of their points.
func discountAlikeDeaths(trials []Trial) {
	if end, alike := diedAlike(trials); alike >= SameWords {
		forgive(trials[:end])
	}
}

// Forgiven returns the trials as they are when the machine is mended that their servers died of: where all of them died alike, none counts.
// It is for a run that begins, for the few trials that a small budget allows are not enough to blame the machine without a word of the user.
func Forgiven(trials []Trial) []Trial {
	trials = slices.Clone(trials)
	if AllDiedAlike(trials) {
		forgive(trials)
	}
	return trials
}

// AllDiedAlike reports whether the servers of all trials, one at least, died in their start with the same words.
func AllDiedAlike(trials []Trial) bool {
	end, alike := diedAlike(trials)
	return alike > 0 && end == len(trials)
}

// diedAlike returns how many of the first trials died with the same words, and where those trials end. Trials of which nothing is known
// do not part them.
func diedAlike(trials []Trial) (end, alike int) {
	words := ""
	for i := range trials {
		t := &trials[i]
		if t.State != Done || t.Result.Outcome == trial.Unknown && t.Counts() {
			continue
		}
		own, ok := lastWords(t.Result)
		if !ok || alike > 0 && own != words {
			return i, alike
		}
		alike, words = alike+1, own
	}
	return len(trials), alike
}

// forgive has trials say nothing of their points.
func forgive(trials []Trial) {
	for i := range trials {
		if r := &trials[i].Result; r.Outcome == trial.Infeasible {
			r.Outcome, r.Cause = trial.Unknown, serverctl.SameWords
		}
	}
}

// as returns a trial that was read alone with what the trials before it say of it, as its summary has it.
func (t Trial) as(summary Trial) Trial {
	t.Result.Outcome, t.Result.Cause = summary.Result.Outcome, summary.Result.Cause
	return t
}

// figures differ from one death to the next: process numbers, addresses, times, ports.
var figures = regexp.MustCompile(`0x[0-9a-fA-F]+|[0-9]+`)

// lastWords are what a server died of before it was ready, if that may have been the machine. A lack of memory is the point's, and
// so are flags that exclude each other, unless no flag changes a letter of the words.
func lastWords(r trial.Result) (words string, ok bool) {
	if r.Outcome != trial.Infeasible && r.Cause != serverctl.SameWords || r.Facts.StartUp > 0 || r.Evidence == "" {
		return "", false
	}
	switch r.Class {
	case serverctl.StartCrash:
		return figures.ReplaceAllString(r.Evidence, "#"), true
	case serverctl.FlagsRejected:
		return r.Evidence, true
	}
	return "", false
}
