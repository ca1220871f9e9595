package studies

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The kinds of what is known of the world: see Study.
const (
	asked = "asked"
	found = "found"
	noted = "noted"
)

// writeWorld stores the world of a run in the place of the last one's. What was found or noted before and is not known now stays.
func writeWorld(tx *transaction, study New) {
	tx.remove(worldTable, "WHERE kind=?", asked)
	for kind, facts := range map[string]map[string]string{asked: study.World, found: study.Found, noted: study.Noted} {
		for key, value := range facts {
			writeFact(tx, key, value, kind)
		}
	}
}

// writeFact stores one fact of the world in the place of what was known before.
func writeFact(tx *transaction, key, value, kind string) {
	tx.remove(worldTable, "WHERE key=?", key)
	tx.insert(worldTable, []any{key, value, kind})
}

func (r *reading) loadWorld() error {
	s := &r.study
	s.World, s.Found, s.Noted = map[string]string{}, map[string]string{}, map[string]string{}
	return r.all(worldTable, func(row cells) error {
		key, value, kind := row.text(0), row.text(1), row.text(2)
		of := map[string]map[string]string{asked: s.World, found: s.Found, noted: s.Noted}[kind]
		if of == nil {
			return damagedf("world: %s is of the kind %q, which nobody knows", key, kind)
		}
		of[key] = value
		return nil
	})
}

// drift lists what must not have changed since a study began, and has.
func drift(was Study, is New) []string {
	diff := append(changes(was.World, is.World), changes(knownTo(is.Found, was.Found), knownTo(was.Found, is.Found))...)
	if was.Seed != is.Seed {
		diff = append(diff, fmt.Sprintf("%s: %d → %d", seed, was.Seed, is.Seed))
	}
	return diff
}

// final lists what changed and may not, whatever was accepted.
func (is New) final(was Study) []string {
	before, now := map[string]string{}, map[string]string{}
	for _, key := range is.Final {
		before[key], now[key] = was.World[key], is.World[key]
	}
	return changes(before, now)
}

// noticed lists what was noted otherwise before.
func noticed(was Study, is New) []string {
	return changes(knownTo(is.Noted, was.Noted), is.Noted)
}

// knownTo returns the facts of which the others say something too.
func knownTo(others, facts map[string]string) map[string]string {
	both := maps.Clone(facts)
	maps.DeleteFunc(both, func(key, _ string) bool { _, known := others[key]; return !known })
	return both
}

// Worlds returns the trials by the world in which they were measured, the present one last, in which there may be none yet. A change that was taken
// back before a trial was measured with it makes no other world.
func (s Study) Worlds() (worlds [][]Trial) {
	first := 0
	for _, e := range s.Changes() {
		if e.Trial > first && e.Trial <= len(s.Trials) {
			worlds = append(worlds, s.Trials[first:e.Trial])
			first = e.Trial
		}
	}
	return append(worlds, s.Trials[first:])
}

// Asked returns World as it was in each of Worlds, which follows from it and from the changes that were accepted.
func (s Study) Asked() []map[string]string {
	worlds := s.Worlds()
	asked := make([]map[string]string, len(worlds))
	first, facts := len(s.Trials), s.World
	for i, trials := range slices.Backward(worlds) {
		asked[i] = facts
		first -= len(trials)
		facts = maps.Clone(facts)
		for _, line := range slices.Backward(strings.Split(s.Drifts(first), "\n")) {
			undo(facts, line)
		}
		maps.DeleteFunc(facts, func(key, _ string) bool { // that changed too, and was not asked for
			_, isFound := s.Found[key]
			_, isNoted := s.Noted[key]
			return isFound || isNoted || key == seed
		})
	}
	return asked
}

// Changes returns the changes of the world that were accepted, the oldest first: those before one trial as the one that they come to, and none where
// they come to nothing.
func (s Study) Changes() (all []Event) {
	for _, e := range s.Events {
		if e.Kind != Drift {
			continue
		}
		e.Text = s.Drifts(e.Trial)
		switch last := len(all) - 1; {
		case e.Text == "":
		case last >= 0 && all[last].Trial == e.Trial:
			all[last] = e
		default:
			all = append(all, e)
		}
	}
	return all
}

// Drifts returns the changes of the world that were accepted before a trial, and not taken back before it, a line for each.
func (s Study) Drifts(trial int) string {
	var lines []string
	for _, e := range s.Events {
		if e.Kind == Drift && e.Trial == trial {
			lines = append(lines, strings.Split(e.Text, "\n")...)
		}
	}
	return strings.Join(net(lines), "\n")
}

// net is what changes that follow on one another come to.
func net(lines []string) (left []string) {
	var all []change
	for _, line := range lines {
		c, ok := parseChange(line)
		i := slices.IndexFunc(all, func(before change) bool { return before.key == c.key })
		switch {
		case !ok:
			left = append(left, line)
		case i < 0:
			all = append(all, c)
		default:
			all[i].is = c.is
		}
	}
	for _, c := range all {
		was := c.was
		if c.key == "server version" { // of which it is said in which trial it was found
			was, _, _ = strings.Cut(was, " in trial ")
		}
		if was != c.is {
			left = append(left, c.String())
		}
	}
	return left
}

// A change is one line of what changes returns.
type change struct{ key, was, is string }

func (c change) String() string { return fmt.Sprintf("%s: %s → %s", c.key, c.was, c.is) }

func parseChange(line string) (c change, ok bool) {
	key, values, isChange := strings.Cut(line, ": ")
	was, is, hasBoth := strings.Cut(values, " → ")
	return change{key, was, is}, isChange && hasBoth
}

// undo takes back a change as changes writes it.
func undo(facts map[string]string, line string) {
	switch c, ok := parseChange(line); {
	case !ok:
	case c.was == nothing:
		delete(facts, c.key)
	default:
		facts[c.key] = c.was
	}
}

// WorldNumbers returns for each trial, by its number, which world it was measured in: 1 is the first of Worlds.
func (s Study) WorldNumbers() map[int]int {
	numbers := make(map[int]int, len(s.Trials))
	for i, trials := range s.Worlds() {
		for j := range trials { // there may be many, and one is a kilobyte
			numbers[trials[j].Number] = i + 1
		}
	}
	return numbers
}

// Deciding returns the number of the world among whose trials the best one is: the newest in which one met the SLO; where none did, the newest that
// has trials.
func (s Study) Deciding() int {
	newest := 1
	for i, trials := range slices.Backward(s.Worlds()) {
		if slices.ContainsFunc(trials, Trial.Met) {
			return i + 1
		}
		if len(trials) > 0 {
			newest = max(newest, i+1)
		}
	}
	return newest
}

// Present returns the study as it is in its world of now: what it measured before a change of the world was accepted is Prior.
func (s Study) Present() Study {
	worlds := s.Worlds()
	s.Trials, s.Prior = worlds[len(worlds)-1], slices.Clone(s.Prior)
	for _, before := range worlds[:len(worlds)-1] {
		source := fmt.Sprintf("trials %d to %d, before the world changed", before[0].Number, before[len(before)-1].Number)
		for _, t := range before {
			t.Source = source
			s.Prior = append(s.Prior, t)
		}
	}
	return s
}

// seed is what the seed of a study is called among the changes.
const seed = "seed"

// nothing stands for a fact that is not known.
const nothing = "(nothing)"

// changes lists what differs, one line each, in the order of the keys; nothing when all is equal.
func changes(was, is map[string]string) []string {
	keys := map[string]bool{}
	for _, facts := range []map[string]string{was, is} {
		for key := range facts {
			keys[key] = true
		}
	}
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		before, had := was[key]
		now, has := is[key]
		switch {
		case !had:
			lines = append(lines, change{key, nothing, now}.String())
		case !has:
			lines = append(lines, change{key, before, nothing}.String())
		case before != now:
			lines = append(lines, change{key, before, now}.String())
		}
	}
	return lines
}

// worldError tells a person what changed and what can be done.
func worldError(lines []string) error {
	return fmt.Errorf("%w:\n  %s\ntake the old values back, begin a study under another name, or go on with --accept-drift",
		ErrWorldChanged, strings.Join(lines, "\n  "))
}

// finalError tells a person what cannot change within one study.
func finalError(lines []string, name string) error {
	return fmt.Errorf("%w:\n  %s\nthe trials so far were judged by the old value, so they cannot be compared with others: take it back, or begin a study under another name, "+
		"for which tuner import reads the trials of %s as priors", ErrWorldChanged, strings.Join(lines, "\n  "), name)
}
