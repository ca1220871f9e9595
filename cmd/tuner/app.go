package main

import (
	"cmp"
	"context"
	"io"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/urfave/cli/v2"

	"vllmtuner/foreign"
	"vllmtuner/tuner/space"
)

// version is set by the linker.
var version = "dev"

// app returns the tuner command with its subcommands. The channel finish is closed when the user asks for an orderly
// end. All output goes through a foreign.Writer, because it contains names, messages and logs from outside.
func app(stdout, stderr io.Writer, finish <-chan struct{}) *cli.App {
	return &cli.App{
		Name:                   "tuner",
		Usage:                  "find the vLLM flags that serve the most traffic within your limits",
		Version:                version,
		Writer:                 foreign.NewWriter(stdout),
		ErrWriter:              foreign.NewWriter(stderr),
		HideHelpCommand:        true,
		UseShortOptionHandling: true,
		ExitErrHandler:         func(*cli.Context, error) {}, // keeps the library from ending the process, because main ends it
		OnUsageError:           wrongFlag,
		Action:                 unknownCommand,
		Commands:               commands(finish),
		Description: strings.TrimSpace(`
Start here:   tuner demo               a complete study on a simulated H200
Your server:  tuner init > study.yaml  write a study file, then edit it
              tuner check study.yaml   find mistakes without GPU time
              tuner run study.yaml     run the study, or continue it
              tuner best study.yaml    print the best args found`),
	}
}

func commands(finish <-chan struct{}) []*cli.Command {
	all := []*cli.Command{
		initCommand(), checkCommand(finish), runCommand(finish), demoCommand(finish),
		listCommand(), statusCommand(finish), bestCommand(), benchCommand(finish), sweepCommand(finish), simCommand(finish),
		logsCommand(finish),
		doctorCommand(), exportCommand(), importCommand(finish), deleteCommand(finish), guardCommand(finish), restoreCommand(),
	}
	for _, c := range all {
		for _, c := range append([]*cli.Command{c}, c.Subcommands...) {
			c.OnUsageError = wrongFlag
			for _, flag := range c.Flags {
				if flag, ok := flag.(*cli.BoolFlag); ok {
					flag.DisableDefaultText = true // the help need not say that the default is false
				}
			}
		}
	}
	return all
}

// wrongFlag turns the library's error about a flag into a message that says what to do.
func wrongFlag(c *cli.Context, err error, _ bool) error {
	text := err.Error()
	flags, command := c.App.Flags, c.App.Name
	if c.Command != nil && c.Command.Name != "" && c.Command.Name != c.App.Name {
		flags, command = c.Command.Flags, c.App.Name+" "+c.Command.Name
	}
	if name, ok := strings.CutPrefix(text, "flag provided but not defined: -"); ok {
		var names []string
		for _, flag := range flags {
			names = append(names, flag.Names()...)
		}
		slices.Sort(names)
		names = slices.DeleteFunc(names, func(n string) bool { return len(n) < 2 })
		if near := space.Nearest(name, names); near != "" {
			return usage("%s: there is no such flag; did you mean %s?", dashed(name), dashed(near))
		}
		for i, n := range names {
			names[i] = dashed(n)
		}
		return usage("%s: there is no such flag; use one of %s", dashed(name), strings.Join(names, ", "))
	}
	if name, ok := strings.CutPrefix(text, "flag needs an argument: -"); ok {
		return usage("%s needs a value; see `%s --help`", dashed(name), command)
	}
	if parts := wrongValue.FindStringSubmatch(text); parts != nil {
		return usage("%s %s: %s", dashed(parts[2]), parts[1], expectedBy(flags, parts[2], parts[3]))
	}
	return usageError{err}
}

// wrongValue matches the library's error about the value of a flag.
var wrongValue = regexp.MustCompile(`(?s)value "(.*?)" for (?:flag )?-([^:]*)(?:: (.*))?$`)

func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// oneOf returns an error if the value of a flag is not allowed. The error lists the allowed values, and suggests one
// that is spelled similarly.
func oneOf(flag, value string, allowed ...string) error {
	if slices.Contains(allowed, value) {
		return nil
	}
	last := len(allowed) - 1
	text := strings.Join(allowed[:last], ", ") + " and " + allowed[last]
	if near := space.Nearest(value, allowed); near != "" {
		text += "; did you mean " + near + "?"
	}
	return usage("--%s %s: allowed are %s", flag, cmp.Or(value, `""`), text)
}

// expectedBy says which values the flag with the given name takes. For some flags it returns the library's explanation.
func expectedBy(flags []cli.Flag, name, explanation string) string {
	i := slices.IndexFunc(flags, func(f cli.Flag) bool { return slices.Contains(f.Names(), name) })
	if i < 0 {
		return explanation
	}
	switch flags[i].(type) {
	case *cli.DurationFlag:
		return "write a time with its unit, such as 5s, 300ms or 2m"
	case *cli.BoolFlag:
		return "leave the value out, or write true or false"
	case *cli.Float64Flag:
		return "write a number, such as 2.5"
	case *cli.IntFlag, *cli.Uint64Flag:
		if strings.Contains(explanation, "out of range") {
			return "the number is too large; write a smaller whole number"
		}
		if _, unsigned := flags[i].(*cli.Uint64Flag); unsigned {
			return "write a whole number of 0 or more"
		}
		return "write a whole number"
	}
	return explanation
}

// unknownCommand prints the help for an empty command line, and refuses an unknown command.
func unknownCommand(c *cli.Context) error {
	if c.Args().Len() == 0 {
		return cli.ShowAppHelp(c)
	}
	return noCommand("tuner", c.Args().First(), c.App.Commands)
}

// noCommand returns the error for an unknown command word. It suggests the most similar command, or lists all commands.
func noCommand(of, word string, list []*cli.Command) error {
	var names []string
	for _, known := range list {
		if !known.Hidden && known.Name != "help" {
			names = append(names, known.Name)
		}
	}
	return usage("%s has no command %q; %s", of, word, space.DidYouMean(word, names))
}

// rootFlag returns the flag that names the directory of the studies.
func rootFlag() cli.Flag { return rootFlagOf("studies", "") }

// rootFlagOf returns rootFlag with the given default value. If text is not empty, the help shows this text instead of
// the default.
func rootFlagOf(value, text string) cli.Flag {
	return &cli.StringFlag{Name: "root", Value: value, DefaultText: text, EnvVars: []string{"TUNER_ROOT"}, Usage: "`directory` that holds the studies",
		Action: func(_ *cli.Context, root string) error {
			if root == "" { // an empty root would mean the working directory
				return usage("--root (TUNER_ROOT) is empty: name a directory, such as . for this one")
			}
			return nil
		}}
}

// formatFlag returns the flag that chooses the output format.
func formatFlag() cli.Flag {
	return &cli.StringFlag{Name: "output", Aliases: []string{"o"}, Value: "text", Usage: "`format` of the output: text, json or yaml"}
}

// formatOf returns the value of formatFlag. It also prepares the app's writer for JSON if that is the format.
func formatOf(c *cli.Context) (string, error) {
	f := c.String("output")
	if err := oneOf("output", f, "text", "json", "yaml"); err != nil {
		return "", err
	}
	printDocuments(c, f)
	return f, nil
}

// printDocuments makes JSON output escape the characters that foreign.Writer drops. foreign.YAML escapes them itself.
func printDocuments(c *cli.Context, format string) {
	if format == "json" {
		c.App.Writer = foreign.NewJSON(c.App.Writer)
	}
}

// writeDocument writes the document as JSON or YAML if format says so. Otherwise it writes the text.
func writeDocument(w io.Writer, format string, document any, text string) error {
	switch format {
	case "json":
		return foreign.WriteJSON(w, document)
	case "yaml":
		encoded, err := foreign.YAML(document)
		if err != nil {
			return err
		}
		text = string(encoded)
	}
	_, err := io.WriteString(w, text)
	return err
}

// oneArg returns the only argument of a command. If there is no argument, or more than one, oneArg returns an error.
// The error calls the argument by its description, such as "a study file".
func oneArg(c *cli.Context, description string) (string, error) {
	if c.Args().Len() != 1 {
		return "", usage("%s needs one argument: %s; see `tuner %s --help`", c.Command.Name, description, c.Command.Name)
	}
	return c.Args().First(), nil
}

// flagsFirst moves the flags of a subcommand before its arguments. The library reads no flags after the first argument,
// but everybody writes `tuner run study.yaml --root /studies`. If a subcommand has
// SkipFlagParsing, its flags are vLLM's, and flagsFirst changes nothing.
func flagsFirst(args []string) []string {
	var command *cli.Command
	depth := 1
	for list := commands(nil); depth < len(args) && len(list) > 0; depth++ {
		i := slices.IndexFunc(list, func(c *cli.Command) bool { return c.Name == args[depth] })
		if i < 0 {
			return args
		}
		command, list = list[i], list[i].Subcommands
	}
	if command == nil || len(command.Subcommands) > 0 || command.SkipFlagParsing {
		return args
	}
	var flags, rest []string
	for words := args[depth:]; len(words) > 0; words = words[1:] {
		word := words[0]
		switch {
		case word == "--":
			rest = append(rest, words[1:]...)
			words = words[:1]
		case len(word) < 2 || word[0] != '-':
			rest = append(rest, word)
		case takesValue(command, word) && len(words) == 1:
			return append(slices.Concat(args[:depth], flags), word) // the flag's value is missing; the library reports that
		case takesValue(command, word):
			flags = append(flags, word, words[1])
			words = words[1:]
		default:
			flags = append(flags, word)
		}
	}
	return slices.Concat(args[:depth], flags, []string{"--"}, rest)
}

// takesValue reports whether a word is a flag whose value is the next word.
func takesValue(c *cli.Command, word string) bool {
	name := strings.TrimLeft(word, "-")
	for _, f := range c.Flags {
		if _, isBool := f.(*cli.BoolFlag); !isBool && slices.Contains(f.Names(), name) {
			return true
		}
	}
	return false
}

// endable makes an action end as soon as the channel finish is closed. It is for commands that have no step to finish
// first.
func endable(finish <-chan struct{}, action cli.ActionFunc) cli.ActionFunc {
	return func(c *cli.Context) error {
		ctx, cancel := orderly(c.Context, finish)
		defer cancel()
		c.Context = ctx
		return action(c)
	}
}

// orderly returns a context that ends when ctx ends or the channel finish is closed.
func orderly(ctx context.Context, finish <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	select {
	case <-finish: // the user asked before the command began
		cancel()
	default:
	}
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-finish:
			cancel()
		case <-ctx.Done():
		}
	})
	return ctx, func() {
		cancel()
		watch.Wait()
	}
}
