package studies

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"vllmtuner/trial"
)

// These are the kinds of facts of a study's world. The facts of each kind are in Study.World, Study.Found and
// Study.Noted.
const (
	asked = "asked"
	found = "found"
	noted = "noted"
)

// writeWorld replaces the stored world with the world of a new run. A fact in Found or Noted stays if the new run does
// not know it.
func writeWorld(tx *transaction, study New) {
	tx.remove(worldTable, "WHERE kind=?", asked)
	for kind, facts := range map[string]map[string]string{asked: study.World, found: study.Found, noted: study.Noted} {
		for key, value := range facts {
			writeFact(tx, key, value, kind)
		}
	}
}

// writeFact stores one fact of the world and replaces its old value.
func writeFact(tx *transaction, key, value, kind string) {
	tx.remove(worldTable, "WHERE key=?", key)
	tx.insert(worldTable, []any{key, value, kind})
}

func (r *loader) loadWorld() error {
	s := &r.study
	s.World, s.Found, s.Noted = map[string]string{}, map[string]string{}, map[string]string{}
	err := r.readTable(worldTable, func(fact row) error {
		key, value, kind := fact.text("key"), fact.text("value"), fact.text("kind")
		of := map[string]map[string]string{asked: s.World, found: s.Found, noted: s.Noted}[kind]
		if of == nil {
			return damagedf("world: %s has the unknown kind %q", key, kind)
		}
		of[key] = value
		return nil
	})
	s.OldCache = oldCache(s.World["cache"])
	return err
}

// oldCache extracts the cache protocol from a text in the world, such as "protocol reset, prime rate 0 req/s". If there
// is no text, it returns "". Only the results of older tuners need this function. Newer results store the protocol as a
// value.
func oldCache(text string) trial.Protocol {
	protocol, _, _ := strings.Cut(strings.TrimPrefix(text, "protocol "), ",")
	if protocol == "of the workload" { // the protocol is trial.Steady or trial.Primed; neither empties the cache
		return trial.Carried
	}
	return trial.Protocol(protocol)
}

// fits returns an error if the stored study cannot go on with these settings. A study without measurements fits any
// world. If it has imported trials, the facts by which they were judged must stay the same.
func (is New) fits(stored Study, measured bool, options Options) error {
	if stored.Name != is.Name {
		return unusablef("the directory holds the study %q, not %q", stored.Name, is.Name)
	}
	judged := measured || len(stored.Prior) > 0
	diff := drift(stored, is)
	switch {
	case judged && len(is.finalChanges(stored)) > 0:
		return finalError(is.finalChanges(stored), is.Name)
	case measured && len(diff) > 0 && !options.AcceptDrift:
		return worldError(diff)
	}
	return nil
}

// drift lists the changes that need AcceptDrift. They are changes of World facts, of the seed, and of those Found facts
// that both runs know.
func drift(was Study, is New) Changes {
	all := append(difference(was.World, is.World), difference(knownTo(is.Found, was.Found), knownTo(was.Found, is.Found))...)
	if was.Seed != is.Seed {
		all = append(all, Change{Fact: factSeed, Was: new(formatSeed(was.Seed)), Is: new(formatSeed(is.Seed))})
	}
	return all
}

// finalChanges lists the changes that are refused even with AcceptDrift.
func (is New) finalChanges(was Study) Changes {
	before, now := map[string]string{}, map[string]string{}
	for _, key := range is.Final {
		before[key], now[key] = was.World[key], is.World[key]
	}
	return difference(before, now)
}

// knownTo returns those facts whose keys are also in the map others.
func knownTo(others, facts map[string]string) map[string]string {
	both := maps.Clone(facts)
	maps.DeleteFunc(both, func(key, _ string) bool { _, known := others[key]; return !known })
	return both
}

// Worlds groups the trials by the world they were measured in. The present world is last and may have no trial yet. If
// a change was taken back before the next trial, it does not begin a world.
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

// Asked returns the World facts of each world that Worlds returns. It starts from the present World and takes back the
// accepted changes, the newest first.
func (s Study) Asked() []map[string]string {
	worlds := s.Worlds()
	asked := make([]map[string]string, len(worlds))
	first, facts := len(s.Trials), s.World
	for i, trials := range slices.Backward(worlds) {
		asked[i] = facts
		first -= len(trials)
		facts = maps.Clone(facts)
		if facts == nil {
			facts = map[string]string{}
		}
		for _, c := range slices.Backward(s.ChangesBefore(first)) {
			if c.Was != nil {
				facts[c.Fact] = *c.Was
			} else {
				delete(facts, c.Fact)
			}
		}
		maps.DeleteFunc(facts, func(key, _ string) bool { // Found facts, Noted facts and the seed can change too, but are not in World
			_, isFound := s.Found[key]
			_, isNoted := s.Noted[key]
			return isFound || isNoted || key == factSeed
		})
	}
	return asked
}

// Changes returns the accepted changes of the world, the oldest first. All changes before the same trial are merged
// into one event. Changes that cancel each other out are left out.
func (s Study) Changes() (all []Event) {
	for _, e := range s.Events {
		if e.Kind != Drift {
			continue
		}
		e.Changes = s.ChangesBefore(e.Trial)
		switch last := len(all) - 1; {
		case len(e.Changes) == 0:
		case last >= 0 && all[last].Trial == e.Trial:
			all[last] = e
		default:
			all = append(all, e)
		}
	}
	return all
}

// ChangesBefore returns the changes of the world that were accepted right before a trial. Changes that cancel each
// other out are left out.
func (s Study) ChangesBefore(trial int) Changes {
	var all Changes
	for _, e := range s.Events {
		if e.Kind == Drift && e.Trial == trial {
			all = append(all, e.Changes...)
		}
	}
	return all.net()
}

// WorldNumbers maps the number of each trial to the number of its world. The first world is 1.
func (s Study) WorldNumbers() map[int]int {
	numbers := make(map[int]int, len(s.Trials))
	for i, trials := range s.Worlds() {
		for j := range trials { // by index, because copying a trial copies a kilobyte
			numbers[trials[j].Number] = i + 1
		}
	}
	return numbers
}

// Deciding returns the number of the world whose best trial decides the study. It is the newest world in which a trial
// met the SLO. If no trial did, it is the newest world with trials.
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

// Present returns the study as seen from its present world. Trials of earlier worlds are moved to Prior.
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

// worldError says what changed and what the user can do.
func worldError(changes Changes) error {
	return fmt.Errorf("%w:\n  %s\nrestore the old values, begin a study under another name, or go on with --accept-drift",
		ErrWorldChanged, strings.Join(changes.lines(), "\n  "))
}

// finalError says which changes no study can accept, and what the user can do.
func finalError(changes Changes, name string) error {
	return fmt.Errorf("%w:\n  %s\nthe trials so far were judged by the old value, so new ones cannot be compared with them\nrestore the old value, or begin a study under another name; "+
		"`tuner import` can give it the trials of %s as priors", ErrWorldChanged, strings.Join(changes.lines(), "\n  "), name)
}
