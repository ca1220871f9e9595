package report

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/tuner/space"
)

// BestShell writes the winning args in one line, quoted for a POSIX shell. A shell does not interpret quotes in the
// output of a command. So args with quotes, such as JSON values, need eval: eval "vllm serve MODEL $(tuner best --shell
// STUDY)".
func BestShell(w io.Writer, study studies.Study) error {
	best, ok := Best(study)
	if !ok {
		return ErrNothingMet
	}
	words := lo.Map(best.Trial.Args, func(arg string, _ int) string { return space.ShellWord(arg) })
	var l lines
	l.Line("%s", strings.Join(words, " "))
	return l.Flush(w)
}

// BestEnv writes the winner's environment variables in one line, quoted for a POSIX shell. Variables that the winner
// keeps out of the environment come first, as -u NAME. The line is empty if the winner has none of either kind. It is for env(1): eval "env $(tuner best --env STUDY) vllm serve MODEL $(tuner best --shell STUDY)".
func BestEnv(w io.Writer, study studies.Study) error {
	best, ok := Best(study)
	if !ok {
		return ErrNothingMet
	}
	var l lines
	words := lo.Map(unset(best.Trial), func(name string, _ int) string { return "-u " + name })
	l.Line("%s", strings.Join(append(words, assignments(best.Trial)...), " "))
	return l.Flush(w)
}

// assignments returns a NAME=value word for each environment variable of a trial, quoted for a POSIX shell.
func assignments(t studies.Trial) []string {
	env := t.Point.Env()
	return lo.Map(slices.Sorted(maps.Keys(env)), func(name string, _ int) string { return name + "=" + space.ShellWord(env[name]) })
}

// unset returns the variables that a trial keeps out of the server's environment by choice.
func unset(t studies.Trial) (names []string) {
	for name, value := range t.Point {
		if space.IsVariable(name) && value == space.Unset {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// A container is the part of a Kubernetes container that the winner decides.
type container struct {
	Args []string   `json:"args"`
	Env  []variable `json:"env,omitempty"`
}

type variable struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

func containerOf(t studies.Trial) container {
	c, env := container{Args: append([]string{}, t.Args...)}, t.Point.Env()
	for _, name := range slices.Sorted(maps.Keys(env)) {
		c.Env = append(c.Env, variable{name, env[name]})
	}
	return c
}

// BestYAML writes the winning args and environment variables as YAML, for a container in a Deployment. YAML comments
// hold the evidence.
func BestYAML(w io.Writer, study studies.Study, o Options) error {
	best, ok := Best(study)
	if !ok {
		return ErrNothingMet
	}
	list, err := foreign.YAML(containerOf(best.Trial))
	if err != nil {
		return fmt.Errorf("write the args as YAML: %w", err)
	}
	c := best.Capacity
	var l lines
	l.Line("# %s", headline(best, study.State))
	l.Line("# study %s, trial %d; %s", study.Name, best.Trial.Number, stateText(study, Summarize(study, o)))
	l.Line("# capacity %s", capacityText(c, best.Trial.Result.Facts.Simulated))
	if c.Doubt != "" {
		l.Line("# note: %s", c.Doubt)
	}
	l.Line("# in flight at capacity: %s requests; %s breaks first", render.Number(c.InFlight), c.Binding)
	if advice, ok := o.advice(best); ok {
		l.Line("# advice: %s", advice)
	}
	l.Line("# gain %s", gainText(best))
	if trust := trustText(best); trust != "" {
		l.Line("# %s", trust)
	}
	for _, line := range o.Insight.texts() {
		l.Line("# %s: %s", line.name, line.text)
	}
	for _, note := range Outdated(study, best) {
		l.Line("# note: %s", note)
	}
	if names := unset(best.Trial); len(names) > 0 {
		l.Line("# not set: %s", strings.Join(names, ", "))
	}
	l.Line("# Add your model, host and port: the study sets its own, and Kubernetes replaces the whole list.")
	l.Line("%s", strings.TrimSuffix(string(list), "\n"))
	return l.Flush(w)
}

// flagLines returns a line for each flag with its values, quoted for a shell.
func flagLines(args []string) []string {
	var all []string
	for _, arg := range args {
		if word := space.ShellWord(arg); space.IsFlag(arg) || len(all) == 0 {
			all = append(all, word)
		} else {
			all[len(all)-1] += " " + word
		}
	}
	return all
}
