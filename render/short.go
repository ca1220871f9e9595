package render

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// ShortNames maps each flag to its initials, so that a choice of flags fits a line. A number distinguishes flags with
// the same initials.
func ShortNames(names []string) map[string]string {
	short, taken := map[string]string{}, map[string]int{}
	for _, name := range slices.Sorted(slices.Values(names)) {
		initials := ""
		for word := range strings.FieldsFuncSeq(name, func(r rune) bool { return r == '-' || r == '_' }) {
			initials += word[:1]
		}
		taken[initials]++
		if n := taken[initials]; n > 1 {
			initials += fmt.Sprint(n)
		}
		short[name] = initials
	}
	return short
}

// Legend explains short names in lines of at most width columns, with as many names in a line as fit.
func Legend(short map[string]string, width int) string {
	var t Text
	line := ""
	for _, name := range slices.SortedFunc(maps.Keys(short), func(a, b string) int { return strings.Compare(short[a], short[b]) }) {
		word := short[name] + " " + name
		switch {
		case line == "":
			line = word
		case Width(line)+Width(word)+3 > width:
			t.Line("%s", Clip(line+",", width))
			line = word
		default:
			line += ", " + word
		}
	}
	t.Line("%s", Clip(line, width))
	return t.String()
}
