package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/prior"
	"vllmtuner/studies/report"
	"vllmtuner/studies/silent"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

func importCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "import",
		Usage:     "begin a study with what was measured elsewhere",
		ArgsUsage: "STUDY.yaml PATH...",
		Description: `A PATH is a result.txt of auto_tune.sh or its folder, JSON files of
vllm bench serve --save-result or their folder, an Optuna SQLite file,
another study's directory, or the SQLite files that tuner export wrote of it.
The search learns from what they hold, and the best point of each source gets
a trial of its own early. Nothing imported counts as a trial or can win. The
same PATH again replaces what it held. Several PATHs of vllm bench serve are
one source, which the same ones together replace.

Examples:
  tuner import study.yaml auto-benchmark/2026_03_01_10_30 --dry-run
  tuner import study.yaml runs/seqs128 --set max-num-seqs=128
  tuner import study.yaml studies/llama70b-old

Exit codes: 0 done; 2 a file or the command line is wrong, or nothing in the
files is of use: then nothing is stored; 3 another tuner owns the study;
6 the world changed since the study began. See docs/export.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringSliceFlag{Name: "set", Usage: "`FLAG=VALUE` of the servers that were measured, where the files do not say it; may be repeated"},
			&cli.BoolFlag{Name: "defaults", Usage: "files that say no flag are of a server with none of the searched flags"},
			&cli.BoolFlag{Name: "any-model", Usage: "take results under another model's name, such as an alias"},
			&cli.StringFlag{Name: "optuna-study", Usage: "the `NAME` of the study in an Optuna file that holds several"},
			takeoverFlag(),
			&cli.BoolFlag{Name: "dry-run", Usage: "print what would be taken, and store nothing"},
		},
		Action: onDisk(func(c *cli.Context) error {
			ctx, cancel := orderly(c.Context, finish)
			defer cancel()
			return importAction(ctx, c)
		}),
	}
}

// errNothingTaken is that of an import without effect.
var errNothingTaken = errors.New("nothing in it is of use to this study; nothing is stored")

// errImportEnded is that of an import which the user ends before it stores.
const errImportEnded = interruptedError("interrupted; nothing is stored")

// importAction reads everything, prints what came of it, and stores it if there is no error.
func importAction(ctx context.Context, c *cli.Context) error {
	if c.Args().Len() < 2 {
		return usage("import needs a study file and at least one path; see `tuner import --help`")
	}
	file, err := studyfile.Read(c.Args().First())
	if err != nil {
		return err
	}
	begun, reader, err := importPlan(ctx, c, file)
	switch {
	case ctx.Err() != nil:
		return errImportEnded
	case err != nil:
		return usageError{err}
	}
	after, err := takeoverOf(c)
	if err != nil {
		return err
	}
	dir := filepath.Join(c.String("root"), file.Name)
	paths := c.Args().Tail()
	if err := notItself(dir, paths); err != nil {
		return err
	}
	if err := studies.CheckDir(dir); err != nil {
		return err
	}
	if own, err := readNone(dir); err == nil { // else there is none yet, or storing says what is wrong
		reader.ID = own.ID
	}
	sources, err := silent.Await(ctx, func() ([]prior.Source, error) { return reader.Read(paths) })
	switch {
	case ctx.Err() != nil:
		return errImportEnded
	case err != nil:
		return usageError{err}
	}
	taken := 0
	for i := range sources {
		taken += len(sources[i].Taken)
		if err := writeSource(c.App.Writer, &sources[i]); err != nil {
			return err
		}
	}
	switch {
	case taken == 0:
		return usageError{errNothingTaken}
	case c.Bool("dry-run"):
		_, err := fmt.Fprintf(c.App.Writer, "dry run: nothing is stored of %s\n", render.Count(taken, "prior"))
		return err
	}
	if err := storePriors(ctx, dir, begun, after, sources); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "%s stored in %s; `tuner run %s` measures the best of each source first\n", render.Count(taken, "prior"), dir, file.Path)
	return err
}

// importPlan opens the study's workload and its search. The server may be elsewhere.
func importPlan(ctx context.Context, c *cli.Context, file *studyfile.File) (begun studies.New, r *prior.Reader, err error) {
	p, err := plan.OpenSearch(file)
	if err != nil {
		return begun, nil, err
	}
	if begun, err = p.Begin(version); err != nil {
		return begun, nil, err
	}
	r = &prior.Reader{
		Space: p.Space, SLO: file.SLO(), World: begun.World,
		Defaults: c.Bool("defaults"), AnyModel: c.Bool("any-model"), OptunaStudy: c.String("optuna-study"),
	}
	r.Set, err = setFlags(p.Space, c.StringSlice("set"))
	return begun, r, err
}

// setFlags reads the searched flags that the user sets for all files.
func setFlags(s *space.Space, words []string) (map[string]string, error) {
	flags := map[string]string{}
	for _, word := range words {
		name, value, ok := strings.Cut(word, "=")
		name = strings.ReplaceAll(strings.TrimLeft(name, "-"), "_", "-")
		switch {
		case !ok || name == "" || value == "":
			return nil, fmt.Errorf("--set %s: write it as --set max-num-seqs=128", word)
		case s.Parameter(name) == nil:
			var names []string
			for _, p := range s.Parameters() {
				names = append(names, p.Name)
			}
			return nil, fmt.Errorf("--set %s: this study does not search %s; %s", word, name, space.DidYouMean(name, names))
		}
		flags[name] = value
	}
	return flags, nil
}

// notItself refuses to import a study into itself.
func notItself(dir string, paths []string) error {
	own, err := os.Stat(dir)
	if err != nil {
		return nil // there is none yet
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil && os.SameFile(own, info) {
			return usage("%s is the study itself, which knows its own trials; name another", path)
		}
	}
	return nil
}

// storePriors begins the study, or goes on with it, as its owner for a moment. A study that is begun is a stopped one from its beginning, whatever comes
// after it.
func storePriors(ctx context.Context, dir string, begun studies.New, takeover time.Duration, sources []prior.Source) (err error) {
	begun.State, begun.Note = studies.Stopped, "begun by `tuner import`; `tuner run` goes on"
	store, _, err := studies.Open(ctx, dir, begun, studies.Options{TakeoverAfter: takeover})
	if errors.Is(err, context.Canceled) {
		return errImportEnded
	}
	if errors.Is(err, studies.ErrWorldChanged) {
		return fmt.Errorf("%w\nimport takes no changes, as only tuner run has --accept-drift: take the old values back, or import into a study under another name", err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	var some []studies.Source
	for _, s := range sources {
		if len(s.Taken) > 0 {
			some = append(some, studies.Source{Name: s.Name, Path: s.Path, Trials: s.Trials()})
		}
	}
	return store.AddPriors(some)
}

// mostRows is how many trials, and reasons to leave some out, are shown of a source.
const mostRows = 10

// writeSource prints what was taken of a source, the best first, and what was not and why.
func writeSource(w io.Writer, s *prior.Source) error {
	var t render.Text
	t.Paragraph(fmt.Sprintf("%s (%s): %d taken, %d left out", s.Name, s.Kind, len(s.Taken), len(s.Left)), "  ")
	for line := range strings.Lines(report.PriorTable(s.Trials(), mostRows)) {
		t.WriteString(wrappedCell(line))
	}
	for _, group := range grouped(s.Left) {
		t.Paragraph(fmt.Sprintf("  left out: %s: %s", group.from, group.why), "    ")
	}
	for _, note := range s.Notes {
		t.Paragraph("  note: "+note, "    ")
	}
	return t.Flush(w)
}

// wrappedCell breaks the last cell of a table's line, where the line is too long, and keeps the cells before it as they are.
func wrappedCell(line string) string {
	start := strings.LastIndex(line, "  ") + len("  ")
	if len(line) <= 80+len("\n") || strings.TrimSpace(line[:start]) == "" {
		return line
	}
	return render.Hang(line[:start], line[start:], strings.Repeat(" ", start), render.DefaultWidth)
}

// A reason is why some of a source was left out.
type reason struct {
	from, why string
	n         int
}

// grouped puts together what was left out for one reason.
func grouped(left []prior.Left) (all []reason) {
	index := map[string]int{}
	for _, l := range left {
		if i, known := index[l.Why]; known {
			all[i].n++
			continue
		}
		index[l.Why] = len(all)
		all = append(all, reason{l.From, l.Why, 1})
	}
	for i := range all {
		if all[i].n > 1 {
			all[i].from += fmt.Sprintf(" and %d more", all[i].n-1)
		}
	}
	if more := len(all) - mostRows; more > 0 {
		all = append(all[:mostRows], reason{from: fmt.Sprintf("%d more", more), why: "of other reasons"})
	}
	return all
}
