package main

import (
	"io"
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
)

// The library does not wrap the lines of flags. HelpPrinter is its only hook to change that.
func init() { cli.HelpPrinter = printHelp }

// lastColumn matches everything before the last column of a line of help.
var lastColumn = regexp.MustCompile(`^ *(\S.*  +)?`)

// printHelp prints a help text within 80 columns.
func printHelp(w io.Writer, template string, data any) {
	var text strings.Builder
	cli.HelpPrinterCustom(&text, template, data, nil)
	for line := range strings.Lines(text.String()) {
		if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 80 {
			head := lastColumn.FindString(line)
			line = render.Hang(head, line[len(head):], strings.Repeat(" ", len(head)), render.DefaultWidth)
		}
		_, _ = io.WriteString(w, line) // the library's printer returns no error either
	}
}
