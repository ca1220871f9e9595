package main

import (
	"io"
	"regexp"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
)

// The library does not wrap the lines of flags. HelpPrinter is its only hook to change that.
func init() { cli.HelpPrinter = printHelp }

// beforeText matches the text before the description in a line of help. This text is a flag or command in its column,
// or the name of a command with a dash.
var beforeText = regexp.MustCompile(`^ *\S.*  +|^ +[a-z ]+ - `)

// minHelp is the smallest number of columns in which a description is broken into lines.
const minHelp = 20

// printHelp prints a help text within the width of the terminal. It breaks only the descriptions of flags and commands.
// The other lines are broken by hand, and some are commands to copy.
func printHelp(w io.Writer, template string, data any) {
	width := render.Columns(w)
	var text strings.Builder
	cli.HelpPrinterCustom(&text, template, data, nil)
	for line := range strings.Lines(text.String()) {
		head := beforeText.FindString(line)
		if margin := render.Width(head); head != "" && render.Width(line) > width && width-margin >= minHelp {
			line = render.Hang(head, line[len(head):], strings.Repeat(" ", margin), width)
		}
		_, _ = io.WriteString(w, line) // the library's printer returns no error either
	}
}
