// Package render writes figures, texts and tables for people, within the width of their terminal. It never decides what
// they say.
package render

import (
	"slices"
	"strings"

	"github.com/rivo/uniseg"
)

// Width returns the number of columns that a text takes on a terminal. A wide character takes two columns, and a
// combining character takes none.
func Width(text string) int { return uniseg.StringWidth(text) }

// Clip shortens a text to its first line, and this line to at most n columns.
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

// pad fills a text with spaces up to n columns. If alignRight is true, the spaces come before the text, and otherwise
// after it.
func pad(text string, n int, alignRight bool) string {
	fill := blank(max(0, n-Width(text)))
	if alignRight {
		return fill + text
	}
	return text + fill
}

// Wrap breaks a text between words into lines of at most n columns. A longer word gets a line of its own. A number, its
// sign and its unit stay on one line.
func Wrap(text string, n int) []string { return wrap(text, n, n) }

// wrap is Wrap with a different width for the first line.
func wrap(text string, first, rest int) []string {
	var all []string
	line, n := "", first
	for _, word := range pieces(text, min(first, rest)) {
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

// pieces splits a text where a line may break: between words, but not within a figure such as "2.5 req/s" or "<= 60 ms".
// A figure of more than n columns is split too.
func pieces(text string, n int) []string {
	var all []string
	before := ""
	for word := range strings.FieldsSeq(text) {
		last := len(all) - 1
		if inFigure(before, word) && Width(all[last])+1+Width(word) <= n {
			all[last] += " " + word
		} else {
			all = append(all, word)
		}
		before = word
	}
	return all
}

// Hang writes a text behind a head. It breaks the text between words into lines of at most width columns. Lines after
// the first begin with the margin.
func Hang(head, text, margin string, width int) string {
	lines := wrap(text, width-Width(head), width-Width(margin))
	if len(lines) == 0 {
		return strings.TrimRight(head, " ") + "\n"
	}
	return head + strings.Join(lines, "\n"+margin) + "\n"
}

// Paragraph breaks a text between words into lines of at most width columns. The first line keeps its indent, and the
// others begin with the margin.
func Paragraph(text, margin string, width int) string {
	return Hang(text[:len(text)-len(strings.TrimLeft(text, " "))], text, margin, width)
}

func blank(n int) string { return strings.Repeat(" ", n) }

// Break is like Wrap, but also breaks words that are longer than a line. It breaks a word after a slash if there is
// one.
func Break(text string, n int) []string {
	words := strings.Fields(text)
	for i := 0; i < len(words); i++ {
		if word := words[i]; Width(word) > n {
			head := strings.TrimSuffix(Clip(word, n+1), "…")
			if slash := strings.LastIndexByte(head, '/') + 1; slash >= n/2 {
				head = head[:slash]
			}
			if head != "" { // n may be too small for one character
				words = slices.Replace(words, i, i+1, head, word[len(head):])
			}
		}
	}
	return Wrap(strings.Join(words, " "), n)
}
