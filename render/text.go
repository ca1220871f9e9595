// Package render writes counts, spans of time, shares and lines as people read them. It never decides what is said.
package render

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/rivo/uniseg"
)

// Count writes a number of things: "1 probe", "2 probes", "3 studies".
func Count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	switch {
	case strings.HasSuffix(thing, "y"):
		thing = strings.TrimSuffix(thing, "y") + "ies"
	case strings.HasSuffix(thing, "s"), strings.HasSuffix(thing, "x"), strings.HasSuffix(thing, "ch"):
		thing += "es"
	default:
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Done writes how far a count has come: "12 of 30 trials done". all is 0 where nobody knows.
func Done(n, all int, thing string) string {
	if all <= 0 {
		return Count(n, thing) + " done"
	}
	things := strings.TrimPrefix(Count(all, thing), fmt.Sprint(all))
	return fmt.Sprintf("%d of %d%s done", n, all, things)
}

// Percent writes a ratio - 1 with its sign, such as "+4 %". What rounds to nothing has no sign.
func Percent(f float64) string {
	if text := fmt.Sprintf("%+.0f", 100*f); text != "+0" && text != "-0" {
		return text + " %"
	}
	return "0 %"
}

// Span writes a duration: "34 s", "2 min 10 s", "46 min", "2 h 03 min".
func Span(d time.Duration) string {
	d = d.Round(time.Second)
	switch minutes := int(d.Round(time.Minute).Minutes()); {
	case d < time.Minute:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d < 10*time.Minute:
		if seconds := int(d.Seconds()) % 60; seconds > 0 {
			return fmt.Sprintf("%d min %d s", int(d.Minutes()), seconds)
		}
		return fmt.Sprintf("%d min", int(d.Minutes()))
	case minutes < 60:
		return fmt.Sprintf("%d min", minutes)
	default:
		return fmt.Sprintf("%d h %02d min", minutes/60, minutes%60)
	}
}

// Left writes how long something will take still, such as "about 6 min left"; "" where that is less than a second, or not known.
func Left(d time.Duration) string {
	if d < time.Second {
		return ""
	}
	return "about " + Span(d) + " left"
}

// Width is how many columns of a terminal a text takes. A wide character takes two, a combining one none.
func Width(text string) int { return uniseg.StringWidth(text) }

// Clip shortens a text to its first line, of at most n columns.
func Clip(text string, n int) string {
	text, _, _ = strings.Cut(text, "\n")
	if Width(text) <= n {
		return text
	}
	if n <= 0 {
		return ""
	}
	var out strings.Builder
	room := n - 1
	for g := uniseg.NewGraphemes(text); g.Next() && room >= g.Width(); room -= g.Width() {
		out.WriteString(g.Str())
	}
	return out.String() + "…"
}

// Pad fills a text up to n columns, on its left where it is to stand on the right.
func Pad(text string, n int, right bool) string {
	fill := strings.Repeat(" ", max(0, n-Width(text)))
	if right {
		return fill + text
	}
	return text + fill
}

// Wrap breaks a text between words into lines of at most n columns. A word that is longer stands whole, in a line of its own.
func Wrap(text string, n int) []string {
	var all []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case Width(line)+1+Width(word) > n:
			all, line = append(all, line), word
		default:
			line += " " + word
		}
	}
	if line != "" {
		all = append(all, line)
	}
	return all
}

// Bar draws a share as a bar of n columns.
func Bar(share float64, n int) string {
	full := int(math.Round(min(1, max(0, share)) * float64(n)))
	return strings.Repeat("█", full) + strings.Repeat("░", n-full)
}
