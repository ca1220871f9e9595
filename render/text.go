// Package render writes figures, texts and tables as people read them, within the width of their terminal. It never decides
// what is said.
package render

import (
	"strings"

	"github.com/rivo/uniseg"
)

// Width is the number of columns that a text takes on a terminal. A wide character takes two, a combining one none.
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

// Pad fills a text up to n columns with spaces: before it if right is set, and else behind it.
func Pad(text string, n int, right bool) string {
	fill := blank(max(0, n-Width(text)))
	if right {
		return fill + text
	}
	return text + fill
}

// Wrap breaks a text between words into lines of at most n columns. A word that is longer than that has a line of its own.
func Wrap(text string, n int) []string { return wrap(text, n, n) }

// wrap is Wrap with a first line of another width than the rest.
func wrap(text string, first, rest int) []string {
	var all []string
	line, n := "", first
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case Width(line)+1+Width(word) > n:
			all, line, n = append(all, line), word, rest
		default:
			line += " " + word
		}
	}
	if line != "" {
		all = append(all, line)
	}
	return all
}

// Hang writes a text behind a head, broken between words into lines of at most width columns. The lines after the first begin
// with the margin.
func Hang(head, text, margin string, width int) string {
	lines := wrap(text, width-Width(head), width-Width(margin))
	if len(lines) == 0 {
		return strings.TrimRight(head, " ") + "\n"
	}
	return head + strings.Join(lines, "\n"+margin) + "\n"
}

// Paragraph breaks a text between words into lines of at most width columns. The lines after the first begin with the margin;
// the first keeps its own indent.
func Paragraph(text, margin string, width int) string {
	return Hang(text[:len(text)-len(strings.TrimLeft(text, " "))], text, margin, width)
}

func blank(n int) string { return strings.Repeat(" ", n) }

// Break breaks a text into lines of at most n columns: between words, and within a word that is longer than a line.
func Break(text string, n int) []string {
	lines := []string{""}
	for word := range strings.FieldsSeq(text) {
		for word != "" {
			last := &lines[len(lines)-1]
			switch room := n - len(*last) - 1; {
			case *last == "":
				cut := min(len(word), n)
				*last, word = word[:cut], word[cut:]
			case len(word) <= room:
				*last, word = *last+" "+word, ""
			default:
				lines = append(lines, "")
			}
		}
	}
	return lines
}
