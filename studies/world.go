package studies

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// worldDiff lists what differs between two worlds, one line each, in the order of the keys; nothing when they are equal.
func worldDiff(was, is map[string]string) []string {
	keys := maps.Clone(was)
	if keys == nil {
		keys = map[string]string{}
	}
	maps.Copy(keys, is)
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		before, had := was[key]
		now, has := is[key]
		switch {
		case !had:
			lines = append(lines, fmt.Sprintf("%s: (nothing) → %s", key, now))
		case !has:
			lines = append(lines, fmt.Sprintf("%s: %s → (nothing)", key, before))
		case before != now:
			lines = append(lines, fmt.Sprintf("%s: %s → %s", key, before, now))
		}
	}
	return lines
}

// worldError tells a person what changed and what can be done.
func worldError(lines []string) error {
	return fmt.Errorf("%w:\n  %s\ntake the old values back, begin a study under another name, or go on with --accept-drift",
		ErrWorldChanged, strings.Join(lines, "\n  "))
}
