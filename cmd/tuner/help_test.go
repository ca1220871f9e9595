package main

import (
	"context"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
)

// Every help text fits a terminal of 80 columns.
func TestHelpFitsATerminal(t *testing.T) {
	var check func(args []string, commands []*cli.Command)
	check = func(args []string, commands []*cli.Command) {
		var text strings.Builder
		if err := app(&text, &text, nil).RunContext(context.Background(), append(args, "--help")); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		for line := range strings.Lines(text.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%q: %d columns: %s", args, n, line)
			}
		}
		for _, c := range commands {
			if c.SkipFlagParsing { // this command prints vLLM's help
				continue
			}
			check(append(args[:len(args):len(args)], c.Name), c.Subcommands)
		}
	}
	check([]string{"tuner"}, commands(nil))
}

// On a narrow terminal, the descriptions of flags are broken and commands to copy are not.
func TestHelpOnANarrowTerminal(t *testing.T) {
	t.Setenv("COLUMNS", "60")
	var text strings.Builder
	must(t, app(&text, &text, nil).Run([]string{"tuner", "bench", "--help"}))
	for _, want := range []string{"\n   --model NAME         served model (default: the server's\n                        first)\n", " --concurrency 1,2,4,8,16 -o csv\n"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the help has no %q:\n%s", want, text.String())
		}
	}
}
