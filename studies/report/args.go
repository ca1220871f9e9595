package report

import (
	"fmt"
	"io"
	"strings"
	"time"

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

// BestYAML writes the winning args as YAML, to append to the args of a container in a Deployment. YAML comments hold
// the evidence.
func BestYAML(w io.Writer, study studies.Study, o Options) error {
	best, ok := Best(study)
	if !ok {
		return ErrNothingMet
	}
	list, err := foreign.YAML(map[string][]string{"args": append([]string{}, best.Trial.Args...)})
	if err != nil {
		return fmt.Errorf("write the args as YAML: %w", err)
	}
	c := best.Trial.Result.Capacity
	var l lines
	l.Line("# %s", headline(best, study.State))
	l.Line("# study %s, trial %d; %s", study.Name, best.Trial.Number, stateText(study, Summarize(study, o)))
	l.Line("# capacity %s", capacityText(c, best.Trial.Result.Facts.Simulated))
	if c.Doubt != "" {
		l.Line("# note: %s", c.Doubt)
	}
	l.Line("# in flight at capacity: %s requests; %s breaks first", render.Number(c.InFlight), c.Binding)
	if advice, ok := o.advice(best.Trial); ok {
		l.Line("# advice: %s", advice)
	}
	l.Line("# gain %s", gainText(best))
	if trust := trustText(best); trust != "" {
		l.Line("# %s", trust)
	}
	for _, note := range Outdated(study, best) {
		l.Line("# note: %s", note)
	}
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

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
