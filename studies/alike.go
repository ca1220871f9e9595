package studies

import (
	"regexp"
	"slices"

	"vllmtuner/serverctl"
	"vllmtuner/trial"
)

// SameWords is a number of servers. If so many servers at the start of a study all die with the same message, the
// machine is to blame. The first three servers have the default, the user's own args and a sampled point, which have
// hardly a flag in common.
const SameWords = 3

// Counts reports whether a trial says anything about its point. It returns false if the study's first servers all died
// with the same message, although their flags differed. Then the machine or the server's command was broken, and the
// point should be tried again.
func (t Trial) Counts() bool { return t.Result.Cause != serverctl.SameWords }

// discountAlikeDeaths marks the first trials as unknown if their servers all died with the same message. It runs when a
// study is read and does not change what is stored, so it works for studies of older tuners too.
func discountAlikeDeaths(trials []Trial) {
	if end, alike := diedAlike(trials); alike >= SameWords {
		forgive(trials[:end])
	}
}

// Forgiven returns the trials as a new run sees them. If the servers of all trials died with the same message, no trial
// counts, because the user may have repaired the machine since. This matters for budgets with fewer trials than
// SameWords.
func Forgiven(trials []Trial) []Trial {
	trials = slices.Clone(trials)
	if AllDiedAlike(trials) {
		forgive(trials)
	}
	return trials
}

// AllDiedAlike reports whether the servers of all trials died in their start with the same message. It is false if
// there is no trial.
func AllDiedAlike(trials []Trial) bool {
	end, alike := diedAlike(trials)
	return alike > 0 && end == len(trials)
}

// diedAlike finds the first trials that died with the same message. It returns the index after them, and their number.
// Trials with an unknown outcome do not interrupt the series.
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

// forgive marks infeasible trials as unknown.
func forgive(trials []Trial) {
	for i := range trials {
		if r := &trials[i].Result; r.Outcome == trial.Infeasible {
			r.Outcome, r.Cause = trial.Unknown, serverctl.SameWords
		}
	}
}

// figures matches the numbers that may differ between messages that are otherwise equal: process IDs, addresses, times,
// ports.
var figures = regexp.MustCompile(`0x[0-9a-fA-F]+|[0-9]+`)

// lastWords returns the message with which a server died in its start, if the machine may be to blame. A lack of memory
// is always the point's fault. Rejected flags are the point's fault too, unless different flags get exactly the same
// message.
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
