package studies

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// A Change is one fact of the study's world whose value has changed. The world is all that must not change while trials
// are compared. The zero Change means that nothing has changed.
type Change struct {
	Fact    string  // a key of Study.World, Study.Found or Study.Noted; or the seed
	Was, Is *string // the old and the new value; nil if not known
	WasIn   *int    // number of the trial whose server had the value Was; nil if none
}

// Changes are the changes that were found at the same time.
type Changes []Change

// These facts are set by the store itself.
const (
	factSeed          = "seed"
	factServerVersion = "server version"
)

// VersionChange is the change from the server version of an earlier trial to another version.
func VersionChange(before Trial, version string) Change {
	return Change{factServerVersion, &before.Version, &version, &before.Number}
}

// This is the text for a value that is not known.
const nothing = "(nothing)"

// String returns the change as one line, for a person.
func (c Change) String() string {
	was := valueText(c.Was)
	if c.WasIn != nil {
		was += fmt.Sprintf(" in trial %d", *c.WasIn)
	}
	return fmt.Sprintf("%s: %s → %s", c.Fact, was, valueText(c.Is))
}

func valueText(value *string) string {
	if value == nil {
		return nothing
	}
	return *value
}

func (c Changes) lines() (lines []string) {
	for _, change := range c {
		lines = append(lines, change.String())
	}
	return lines
}

// String returns one line for each change.
func (c Changes) String() string { return strings.Join(c.lines(), "\n") }

// Line returns all changes in one line.
func (c Changes) Line() string { return strings.Join(c.lines(), "; ") }

// net merges successive changes of one fact into one change. It drops a fact that has its first value again.
func (c Changes) net() (left Changes) {
	var merged Changes
	for _, change := range c {
		i := slices.IndexFunc(merged, func(before Change) bool { return before.Fact == change.Fact })
		if i < 0 {
			merged = append(merged, change)
		} else {
			merged[i].Is = change.Is
		}
	}
	return slices.DeleteFunc(merged, func(change Change) bool { return sameValue(change.Was, change.Is) })
}

// difference lists the facts that differ, in the order of their keys.
func difference(was, is map[string]string) (all Changes) {
	keys := slices.AppendSeq(slices.Collect(maps.Keys(was)), maps.Keys(is))
	slices.Sort(keys)
	for _, key := range slices.Compact(keys) {
		if before, now := valueOf(was, key), valueOf(is, key); !sameValue(before, now) {
			all = append(all, Change{Fact: key, Was: before, Is: now})
		}
	}
	return all
}

func valueOf(facts map[string]string, key string) *string {
	if value, ok := facts[key]; ok {
		return &value
	}
	return nil
}

func sameValue(a, b *string) bool {
	return a == b || a != nil && b != nil && *a == *b
}

// addChanges stores an event with changes of the world. The event comes before the given trial.
func addChanges(tx *transaction, trial int64, kind string, all Changes) {
	event := tx.nextID(eventsTable)
	tx.insert(eventsTable, []any{event, formatTime(time.Now()), kind, "", trial})
	insertChanges(tx, event, all)
}

// insertChanges stores the changes of an event.
func insertChanges(tx *transaction, event int64, all Changes) {
	for i, c := range all {
		tx.insert(changesTable, []any{event, i, c.Fact, c.Was, c.Is, c.WasIn})
	}
}

// loadChanges returns a map from the ID of each event to the changes of the event. For a database before schema 5 it
// returns no changes, because such a database has them in the texts of its events.
func (r *loader) loadChanges() (of map[int64]Changes, err error) {
	if r.schema < hasChanges {
		return nil, nil
	}
	of = map[int64]Changes{}
	err = r.readTable(changesTable, func(one row) error {
		c := Change{Fact: one.text("fact")}
		if one.value("was") != nil {
			c.Was = new(one.text("was"))
		}
		if one.value("now") != nil {
			c.Is = new(one.text("now"))
		}
		if one.value("was_in_trial") != nil {
			c.WasIn = new(int(one.integer("was_in_trial")))
		}
		event := one.integer("event")
		of[event] = append(of[event], c)
		return nil
	})
	return of, err
}

// splitChanges turns sentences that describe changes into values. Only events before schema 5 have such sentences, and
// no other code reads them.
func (t *transaction) splitChanges() error {
	for _, event := range t.rows(eventsTable, "WHERE kind IN (?, ?) ORDER BY id", Drift, noted) {
		insertChanges(t, event.integer("id"), parseChanges(event.text("text")))
		t.change(event, "text", "")
	}
	return t.err
}

// wasInTrial matches the end of an old value such as "0.14.1 in trial 3". It names the trial whose server had that
// version.
var wasInTrial = regexp.MustCompile(` in trial ([0-9]+)$`)

// parseChanges parses an old event's text, which has a line for each change. A line that does not describe a change
// continues the text of the change before it.
func parseChanges(text string) (all Changes) {
	for line := range strings.SplitSeq(text, "\n") {
		key, values, isChange := strings.Cut(line, ": ")
		was, is, hasBoth := strings.Cut(values, " → ")
		switch {
		case isChange && hasBoth:
			c := Change{Fact: key, Was: parseValue(was), Is: parseValue(is)}
			if m := wasInTrial.FindStringSubmatch(was); m != nil && key == factServerVersion {
				number, _ := strconv.Atoi(m[1]) // cannot fail, because the text has only digits
				c.Was, c.WasIn = new(strings.TrimSuffix(was, m[0])), &number
			}
			all = append(all, c)
		case len(all) > 0:
			last := &all[len(all)-1]
			last.Is = new(valueText(last.Is) + "\n" + line)
		default:
			all = append(all, Change{Fact: "world", Is: &line})
		}
	}
	return all
}

func parseValue(text string) *string {
	if text == nothing {
		return nil
	}
	return &text
}
