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

// lastColumn matches everything before the last column of a line of help.
var lastColumn = regexp.MustCompile(`^ *(\S.*  +)?`)

// minHelp is the smallest number of columns in which a description is broken into lines.
const minHelp = 20

// printHelp prints a help text within the width of the terminal.
func printHelp(w io.Writer, template string, data any) {
	width := render.Columns(w)
	var text strings.Builder
	cli.HelpPrinterCustom(&text, template, data, nil)
	for line := range strings.Lines(text.String()) {
		if head := lastColumn.FindString(line); render.Width(strings.TrimSuffix(line, "\n")) > width && width-len(head) >= minHelp {
			line = render.Hang(head, line[len(head):], strings.Repeat(" ", len(head)), width)
		}
		_, _ = io.WriteString(w, line) // the library's printer returns no error either
	}
}
