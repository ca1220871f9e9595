package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/prior"
	"vllmtuner/studies/silent"
	"vllmtuner/tuner/plan"
	"vllmtuner/tuner/studyfile"
)

func importCommand(finish <-chan struct{}) *cli.Command {
	return &cli.Command{
		Name:      "import",
		Usage:     "begin a study with results that were measured elsewhere",
		ArgsUsage: "STUDY.yaml PATH...",
		Description: `A PATH is one of these:
  - result.txt of auto_tune.sh, or its directory
  - JSON files of vllm bench serve --save-result, or their directory; several
    such PATHs count as one
  - an Optuna SQLite file
  - the directory of another study, or a file of tuner export --format sqlite

The search learns from the imported results, and soon measures the best flags
of each PATH itself. Only flags that this study has measured can win. If you
import a PATH again, the new results replace the old ones.

Examples:
  tuner import study.yaml auto-benchmark/2026_03_01_10_30 --dry-run
  tuner import study.yaml runs/seqs128 --set max-num-seqs=128
  tuner import study.yaml studies/llama70b-old

Exit codes: 0 done; 2 the command line or a file is wrong, or no file has a
result that the study can use; 3 another tuner owns the study; 6 the model,
the workload or the machine changed since the study began.
See docs/export.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringSliceFlag{Name: "set", Usage: "`FLAG=VALUE` that the measured servers had, if the files do not say so; may be repeated"},
			&cli.BoolFlag{Name: "defaults", Usage: "take a file that names no flags as measured with the server's defaults"},
			&cli.BoolFlag{Name: "any-model", Usage: "also accept results of a model with another name, such as an alias"},
			&cli.StringFlag{Name: "optuna-study", Usage: "`NAME` of the study to import, if an Optuna file holds several"},
			takeoverFlag(),
			&cli.BoolFlag{Name: "dry-run", Usage: "print what would be imported, and store nothing"},
		},
		Action: onDisk(endable(finish, importAction)),
	}
}

// errImportEnded is returned when the user stops an import before it stores anything.
const errImportEnded = interruptedError("interrupted; nothing is stored")

// importAction reads all files, prints the results that it takes from them, and stores these results if there is no
// error.
func importAction(c *cli.Context) error {
	ctx := c.Context
	if c.Args().Len() < 2 {
		return usage("import needs a study file and at least one path; see `tuner import --help`")
	}
	file, err := studyfile.Read(c.Args().First())
	if err != nil {
		return err
	}
	begun, reader, err := importPlan(c, file)
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
	if own, err := readResults(dir); err == nil { // on an error the study has not begun, or storePriors will refuse it
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
		if _, err := io.WriteString(c.App.Writer, sources[i].Text(render.Columns(c.App.Writer))); err != nil {
			return err
		}
	}
	switch {
	case taken == 0:
		return usage("these files have no result that this study can use; nothing is stored")
	case c.Bool("dry-run"):
		_, err := fmt.Fprintf(c.App.Writer, "dry run: %s found, nothing stored\n", render.Count(taken, "prior"))
		return err
	}
	if err := storePriors(ctx, dir, begun, after, sources); err != nil {
		return err
	}
	_, err = fmt.Fprintf(c.App.Writer, "%s stored in %s; `tuner run %s` soon measures the best point of each source\n", render.Count(taken, "prior"), dir, file.Path)
	return err
}

// importPlan opens the study's workload and its search. It does not check the server, which may be on another machine.
func importPlan(c *cli.Context, file *studyfile.File) (begun studies.New, r *prior.Reader, err error) {
	p, err := plan.OpenSearch(file)
	if err != nil {
		return begun, nil, err
	}
	if begun, err = p.Begin(version); err != nil {
		return begun, nil, err
	}
	r = &prior.Reader{
		Space: p.Search.Space, SLO: file.SLO, World: begun.World,
		Defaults: c.Bool("defaults"), AnyModel: c.Bool("any-model"), OptunaStudy: c.String("optuna-study"),
	}
	if r.Set, err = prior.ParseSet(p.Search.Space, c.StringSlice("set")); err != nil {
		return begun, nil, fmt.Errorf("--set %w", err)
	}
	return begun, r, nil
}

// notItself refuses to import a study into itself.
func notItself(dir string, paths []string) error {
	own, err := os.Stat(dir)
	if err != nil {
		return nil // the study has not begun
	}
	for _, path := range paths {
		if info, err := os.Stat(path); err == nil && os.SameFile(own, info) {
			return usage("%s is this study itself; give another source", path)
		}
	}
	return nil
}

// storePriors makes this process the study's owner while it stores the results of the sources. A study that does not
// exist yet begins in the state Stopped, so that a failure leaves no study that seems to run.
func storePriors(ctx context.Context, dir string, begun studies.New, takeover time.Duration, sources []prior.Source) (err error) {
	begun.State, begun.Note = studies.Stopped, "begun by `tuner import`; `tuner run` goes on"
	store, _, err := studies.Open(ctx, dir, begun, studies.Options{TakeoverAfter: takeover})
	if errors.Is(err, context.Canceled) {
		return errImportEnded
	}
	if errors.Is(err, studies.ErrWorldChanged) {
		return fmt.Errorf("%w\ntuner import has no --accept-drift: restore the old values, accept the change with `tuner run`, or import into a study with another name", err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	var useful []studies.Source
	for _, s := range sources {
		if len(s.Taken) > 0 {
			useful = append(useful, studies.Source{Path: s.Path, World: s.World, Trials: s.Taken})
		}
	}
	return store.AddPriors(useful)
}
