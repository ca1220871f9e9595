package serverctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/render"
	"vllmtuner/serverctl/proc"
	"vllmtuner/tuner/space"
)

const (
	// helpLimit is how long a server may take to print its help. vLLM first imports torch, which takes 10 s of CPU time
	// even if the files are in the page cache.
	helpLimit = 2 * time.Minute
	// maxHelp is how many bytes of the help are kept; vLLM 0.14.1 prints 82 kB.
	maxHelp = 4 << 20
)

// Flags maps each flag that a server accepts, as written (--max-num-seqs, --no-enable-prefix-caching, -tp), to its
// allowed values. A nil list means that the flag takes any value, or no value.
type Flags map[string][]string

// Help runs the server's command with --help=all and returns the flags that it accepts. It needs no GPU. The variables
// in env are added to our own environment.
func Help(ctx context.Context, command []string, env map[string]string) (flags Flags, err error) {
	config, err := Config{Command: command, Model: "none", Env: env}.withDefaults()
	if err != nil {
		return nil, err
	}
	environ := config.environ()
	program, err := config.program(environ)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, helpLimit, fmt.Errorf("it did not end within %s", render.Took(helpLimit)))
	defer cancel()
	text := &capped{limit: maxHelp}
	argv := slices.Concat([]string{program}, command[1:], []string{"--help=all"})
	asked := strings.Join(slices.Concat(command, []string{"--help=all"}), " ")
	p, err := proc.Start(proc.Spec{Argv: argv, Env: environ, Output: text})
	if err != nil {
		return nil, fmt.Errorf("get the server's flags: %w", err)
	}
	select {
	case <-p.Exited():
	case <-ctx.Done():
		err = fmt.Errorf("get the server's flags: wait for %q: %w", asked, context.Cause(ctx))
	}
	if err := errors.Join(err, p.Stop(context.WithoutCancel(ctx), 0)); err != nil {
		return nil, err
	}
	if flags = parseHelp(text.buf.String()); len(flags) == 0 || p.State().ExitCode() != 0 {
		return nil, fmt.Errorf("get the server's flags: %q ended with %s and listed %s; %s; run it by hand to see why",
			asked, p.State(), render.Count(len(flags), "flag"), lastSaid(text.buf.String()))
	}
	return flags, nil
}

// A capped writer keeps the bytes that are written to it up to a limit, and drops the rest.
type capped struct {
	buf   bytes.Buffer
	limit int
}

func (c *capped) Write(b []byte) (int, error) {
	c.buf.Write(b[:max(0, min(len(b), c.limit-c.buf.Len()))])
	return len(b), nil
}

// lastSaid returns the last lines that a failed help command printed.
func lastSaid(text string) string {
	if text = strings.TrimSpace(text); text == "" {
		return "it printed nothing"
	}
	const shown = 3
	lines := strings.Split(text, "\n")
	return "its last lines: " + strings.Join(lines[max(0, len(lines)-shown):], " | ")
}

var (
	// argparse indents options by two spaces and their descriptions by many more. vLLM indents its examples by three.
	optionLine = pattern(`^  (--?[A-Za-z].*)$`)
	// A description begins two spaces after a short option, or on the next line.
	description = pattern(` {2,}.*`)
	// optionName matches each name of an option, with or without a value: "--seed SEED, -s SEED" up to Python 3.12,
	// "-s, --seed SEED" from 3.13 on. It does not match choices such as {a,-b}, because their comma has no space after
	// it.
	optionName = pattern(`(?:^|, )(--?[A-Za-z][\w-]*)`)
	// choices matches the values of an option with choices: --kv-cache-dtype {auto,fp8,fp8_e4m3}.
	choices = pattern(`\{([^{}]*)\}`)
)

// parseHelp parses the flags of an argparse help.
func parseHelp(text string) Flags {
	flags := Flags{}
	for line := range strings.Lines(colours().ReplaceAllString(text, "")) {
		option := optionLine().FindStringSubmatch(strings.TrimRight(line, "\r\n"))
		if option == nil {
			continue
		}
		names := description().ReplaceAllString(option[1], "")
		var values []string
		if c := choices().FindStringSubmatch(names); c != nil {
			values = strings.Split(c[1], ",")
		}
		for _, name := range optionName().FindAllStringSubmatch(names, -1) {
			flags[name[1]] = values
		}
	}
	return flags
}

// has reports whether the server accepts the flag as written.
func (f Flags) has(name string) bool {
	_, ok := f[name]
	return ok || strings.HasPrefix(name, "-O") && name != "-O" && f.has("--optimization-level")
}

// fullName returns the flag that a name means, by the rule of argparse: the flag of this name, or the only flag that
// begins with the name. The error says what is wrong with the name.
func (f Flags) fullName(name string) (string, error) {
	if f.has(name) {
		return name, nil
	}
	names := slices.Sorted(maps.Keys(f))
	var begin []string
	for _, n := range names {
		if strings.HasPrefix(name, "--") && strings.HasPrefix(n, name) {
			begin = append(begin, n)
		}
	}
	switch near := space.Nearest(name, names); {
	case len(begin) == 1:
		return begin[0], nil
	case len(begin) > 1:
		return "", fmt.Errorf("flag %s could be %s; write it in full", name, strings.Join(begin, " or "))
	case removedFlags[name] != "":
		return "", fmt.Errorf("this server no longer has the flag %s: %s", name, removedFlags[name])
	case near != "":
		return "", fmt.Errorf("this server has no flag %s; did you mean %s?", name, near)
	}
	return "", fmt.Errorf("this server has no flag %s; its --help=all lists its flags", name)
}

// CheckFlags returns an error that names every flag in args that the server does not accept, with the nearest accepted
// flag. The error also names every value that a flag does not allow.
func CheckFlags(accepted Flags, args []string) error {
	var errs []error
	wrong := map[string]bool{} // errors already reported: args has a searched flag once for each of its values
	say := func(err error) {
		if !wrong[err.Error()] {
			wrong[err.Error()] = true
			errs = append(errs, err)
		}
	}
	for i, arg := range args {
		name := flagName(arg)
		if name == "" {
			continue
		}
		name, err := accepted.fullName(name)
		if err != nil {
			say(err)
			continue
		}
		_, value, inline := strings.Cut(arg, "=")
		if !inline && i+1 < len(args) && flagName(args[i+1]) == "" {
			value, inline = args[i+1], true
		}
		allowed := accepted[name]
		if !inline || len(allowed) == 0 || slices.Contains(allowed, value) {
			continue
		}
		did := ""
		if near := space.Nearest(value, allowed); near != "" {
			did = fmt.Sprintf("; did you mean %s?", near)
		}
		say(fmt.Errorf("flag %s does not accept %q; it accepts %s%s", name, value, strings.Join(allowed, ", "), did))
	}
	return errors.Join(errs...)
}

// removedFlags lists flags of vLLM 0.14.1 that 0.33.0 refuses, and says what to do instead (vllm/engine/arg_utils.py of
// both versions).
var removedFlags = map[string]string{
	"--swap-space":                "vLLM V1 never uses swap space; remove it",
	"--disable-log-requests":      "remove it; the server logs requests only with --enable-log-requests",
	"--calculate-kv-scales":       "remove it; scales come with the checkpoint",
	"--logits-processor-pattern":  "remove it; see --logits-processors",
	"--override-attention-dtype":  "remove it",
	"--max-num-partial-prefills":  "its only allowed value was 1; remove it",
	"--max-long-partial-prefills": "its only allowed value was 1; remove it",
}

// flagName returns the flag that an arg names, with dashes, without its value and without a JSON key. It returns ""
// for a value. vLLM's FlexibleArgumentParser accepts --a_b for --a-b, and --config.key for a key of a JSON flag.
func flagName(arg string) string {
	if len(arg) < 2 || arg[0] != '-' {
		return ""
	}
	if _, err := strconv.ParseFloat(arg, 64); err == nil {
		return "" // a negative number
	}
	name := arg
	if i := strings.IndexAny(name, "=."); i >= 0 {
		name = name[:i]
	}
	if strings.HasPrefix(name, "--") {
		name = strings.ReplaceAll(name, "_", "-")
	}
	return name
}
