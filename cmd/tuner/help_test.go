package main

import (
	"context"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
)

// Every help text fits a terminal of 80 columns. No line of it has only the last word of a sentence.
func TestHelpFitsATerminal(t *testing.T) {
	var check func(args []string, commands []*cli.Command)
	check = func(args []string, commands []*cli.Command) {
		var text strings.Builder
		if err := app(&text, &text, nil).RunContext(context.Background(), append(args, "--help")); err != nil {
			t.Fatalf("%q: %v", args, err)
		}
		before := ""
		for line := range strings.Lines(text.String()) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > 80 {
				t.Errorf("%q: %d columns: %s", args, n, line)
			}
			if isOrphan(before, line) {
				t.Errorf("%q: the last word is alone on a line:\n%s%s", args, before, line)
			}
			before = line
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

// isOrphan reports whether a line has a single word that continues the line before. A variable in brackets, such as
// [$TUNER_ROOT], may be alone.
func isOrphan(before, line string) bool {
	words := strings.Fields(line)
	return strings.TrimSpace(before) != "" && len(words) == 1 && !strings.HasPrefix(words[0], "[$") &&
		!strings.HasSuffix(before, ":\n") // a heading, such as VERSION:
}

func TestIsOrphan(t *testing.T) {
	for _, row := range []struct {
		before, line string
		want         bool
	}{
		{"   run a complete study, without a\n", "   GPU\n", true},
		{"  --path PATH   path of the\n", "                nvidia-smi\n", true},
		{"   run a complete study, without\n", "   a GPU\n", false},
		{"   directory of the studies (default: \"studies\")\n", "   [$TUNER_ROOT]\n", false},
		{"VERSION:\n", "   dev\n", false},
		{"\n", "EXAMPLES\n", false},
	} {
		if got := isOrphan(row.before, row.line); got != row.want {
			t.Errorf("isOrphan(%q, %q) = %v, want %v", row.before, row.line, got, row.want)
		}
	}
}
