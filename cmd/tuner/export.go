package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/export"
	"vllmtuner/studies/optuna"
	"vllmtuner/tuner/space"
	"vllmtuner/tuner/studyfile"
)

func exportCommand() *cli.Command {
	return &cli.Command{
		Name:      "export",
		Usage:     "write a study for Optuna, pandas or another program",
		ArgsUsage: "STUDY",
		Description: `STUDY is ` + studyArgument + `.
Reads a published snapshot, and never disturbs the study.

  optuna  a SQLite file in the form of Optuna 4 and 5: for Optuna Dashboard,
          for its plots, or to continue with Optuna
  csv     one row per trial, or with --probes one row per probe
  json    the study with its world, events, trials and probes
  sqlite  everything that is stored, as one database (docs/schema.md)

Examples:
  tuner export llama70b --format optuna -o llama70b.db
  tuner export llama70b --format csv > trials.csv
  tuner export llama70b --format sqlite -o llama70b.db
See docs/export.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "format", Aliases: []string{"f"}, Usage: "`format`: " + formatNames()},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write to `FILE`; without it, csv and json go to standard output"},
			&cli.BoolFlag{Name: "probes", Usage: "with csv: one row per probe"},
			&cli.BoolFlag{Name: "force", Usage: "replace FILE if it exists"},
		},
		Action: onDisk(exportAction),
	}
}

// An exportFormat is one way to write a study. Exactly one of text, file and copied is set. file and copied fill the
// empty file at path.
type exportFormat struct {
	name   string
	series bool // whether the format includes the measurements of each second of a probe
	text   func(io.Writer, exported) error
	file   func(ctx context.Context, path string, e exported) error
	copied func(ctx context.Context, dir, path string) (studies.Study, error) // dir is the study's directory
}

// exported is the data that a format may write.
type exported struct {
	study      studies.Study                   // with summaries of its trials
	trials     iter.Seq2[studies.Trial, error] // complete, read one at a time
	parameters []space.Parameter               // the searched flags, from the stored study file
	fileErr    error                           // the reason if parameters is empty
	probes     bool
}

func exportFormats() []exportFormat {
	return []exportFormat{
		{name: "optuna", file: exportOptuna},
		{name: "csv", text: exportCSV},
		{name: "json", series: true, text: func(w io.Writer, e exported) error { return export.WriteJSON(w, e.study, e.trials) }},
		{name: "sqlite", copied: studies.Export},
	}
}

func formatNames() string {
	var names []string
	for _, f := range exportFormats() {
		names = append(names, f.name)
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}

func exportAction(c *cli.Context) error {
	if !c.IsSet("format") {
		return usage("export needs --format: %s", formatNames())
	}
	i := slices.IndexFunc(exportFormats(), func(f exportFormat) bool { return f.name == c.String("format") })
	if i < 0 {
		return usage("--format %q: there is no such format; write %s", c.String("format"), formatNames())
	}
	format, path := exportFormats()[i], c.String("output")
	switch {
	case c.Bool("probes") && format.name != "csv":
		return usage("--probes is for --format csv; the other formats always include the probes")
	case path == "" && format.text == nil:
		return usage("--format %s writes a file: name it with -o FILE", format.name)
	}
	if path != "" {
		if err := checkNew(path, c.Bool("force")); err != nil {
			return err
		}
	}
	dir, err := studyDir(c)
	if err != nil {
		return err
	}
	study, err := format.export(c, dir)
	warnReader(c.App.ErrWriter, dir, study)
	return err
}

// export writes the study in dir to the file that the command line names, or to standard output.
func (f *exportFormat) export(c *cli.Context, dir string) (study studies.Study, err error) {
	if f.copied == nil {
		return studies.ReadEach(dir, f.series, func(study studies.Study, trials iter.Seq2[studies.Trial, error]) error {
			e := exported{study: study, trials: trials, probes: c.Bool("probes")}
			if file, err := studyfile.Parse(study.Name, []byte(study.File)); err == nil {
				e.parameters = file.Parameters
			} else {
				e.fileErr = err
			}
			return f.write(c, e)
		})
	}
	var unread error // an error of the study, not of the new file
	err = writeNew(c.String("output"), c.Bool("force"), func(temp string) error {
		if study, err = f.copied(c.Context, dir, temp); errors.Is(err, studies.ErrUnusable) {
			unread = err
		}
		return err
	})
	if err == nil {
		printWritten(c, study)
	}
	return study, cmp.Or(unread, err)
}

// write writes e to the file that the command line names, or to standard output.
func (f *exportFormat) write(c *cli.Context, e exported) error {
	path := c.String("output")
	if path == "" {
		printDocuments(c, f.name)
		return f.text(c.App.Writer, e)
	}
	write := func(temp string) error { return f.file(c.Context, temp, e) }
	if f.text != nil {
		write = func(temp string) error { return writeText(temp, func(w io.Writer) error { return f.text(w, e) }) }
	}
	if err := writeNew(path, c.Bool("force"), write); err != nil {
		return err
	}
	printWritten(c, e.study)
	return nil
}

func printWritten(c *cli.Context, study studies.Study) {
	fmt.Fprintf(c.App.ErrWriter, "%s: %s\n", c.String("output"), render.Count(len(study.Trials), "trial"))
}

// readResults reads a study's trials with their results and without their probes.
func readResults(dir string) (studies.Study, error) {
	return studies.ReadSummary(dir, func(studies.Study) []int { return nil })
}

func exportOptuna(_ context.Context, path string, e exported) error {
	if e.fileErr != nil {
		return fmt.Errorf("the ranges of the searched flags are unknown, because the stored study file is of another version of tuner: %w; export the study with that version", e.fileErr)
	}
	return optuna.Write(path, e.study, e.trials, e.parameters)
}

func exportCSV(w io.Writer, e exported) error {
	var flags []string
	for _, p := range e.parameters {
		flags = append(flags, p.Name)
	}
	if e.probes {
		return export.WriteProbes(w, e.study, e.trials, flags)
	}
	return export.WriteTrials(w, e.study, e.trials, flags)
}

func writeText(path string, write func(io.Writer) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}
