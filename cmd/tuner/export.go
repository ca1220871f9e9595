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
It reads a published snapshot and never disturbs the study.

  optuna  a SQLite file as Optuna 4 and 5 keep their studies: for Optuna
          Dashboard, for its plots, and to go on with Optuna
  csv     one row a trial, or with --probes one row a probe
  json    the study with its world, events, trials and probes
  sqlite  all that is stored, as one database: see docs/schema.md

Examples:
  tuner export llama70b --format optuna -o llama70b.db
  tuner export llama70b --format csv > trials.csv
  tuner export llama70b --format sqlite -o llama70b.db
See docs/export.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "format", Aliases: []string{"f"}, Usage: "`format`: " + formatNames()},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write to this `FILE`; csv and json go to standard output without it"},
			&cli.BoolFlag{Name: "probes", Usage: "csv: one row a probe"},
			&cli.BoolFlag{Name: "force", Usage: "replace FILE where it exists"},
		},
		Action: onDisk(exportAction),
	}
}

// An exportFormat is one way to write a study: as text, or as a file that is no text.
type exportFormat struct {
	name   string
	series bool // it has what happened second by second
	text   func(io.Writer, exported) error
	file   func(ctx context.Context, path string, e exported) error // path is an empty file

	copied func(ctx context.Context, dir, path string) (studies.Study, error) // likewise, from the study's directory itself
}

// exported is what a format may need.
type exported struct {
	study      studies.Study                   // its trials are summaries
	trials     iter.Seq2[studies.Trial, error] // whole, one by one
	parameters []space.Parameter               // searched ones, by the study's own file
	fileErr    error                           // why they are not known
	probes     bool
}

// exportFormats are the known ones.
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
	return strings.Join(names, ", ")
}

func exportAction(c *cli.Context) error {
	i := slices.IndexFunc(exportFormats(), func(f exportFormat) bool { return f.name == c.String("format") })
	if i < 0 {
		return usage("--format %q: allowed are %s", c.String("format"), formatNames())
	}
	format, path := exportFormats()[i], c.String("output")
	switch {
	case c.Bool("probes") && format.name != "csv":
		return usage("--probes is for --format csv; the other formats hold the probes in any case")
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
	warnBehind(c.App.ErrWriter, study)
	return err
}

// export writes the study in a directory to the file or the standard output that the command line wants.
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
	var unread error // of the study, and not of the file that is to be written
	err = writeNew(c.String("output"), c.Bool("force"), func(temp string) error {
		if study, err = f.copied(c.Context, dir, temp); errors.Is(err, studies.ErrUnusable) {
			unread = err
		}
		return err
	})
	if err == nil {
		sayWritten(c, study)
	}
	return study, cmp.Or(unread, err)
}

// write writes to the file or the standard output that the command line wants.
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
	sayWritten(c, e.study)
	return nil
}

func sayWritten(c *cli.Context, study studies.Study) {
	fmt.Fprintf(c.App.ErrWriter, "%s: %s\n", c.String("output"), render.Count(len(study.Trials), "trial"))
}

// readNone reads what the trials came to, and no probe.
func readNone(dir string) (studies.Study, error) {
	return studies.ReadSummary(dir, func(studies.Study) []int { return nil })
}

func exportOptuna(_ context.Context, path string, e exported) error {
	if e.fileErr != nil {
		return fmt.Errorf("the ranges of its flags are not known, for its file is one of another tuner: %w; export it with the tuner that ran it", e.fileErr)
	}
	return optuna.WriteEach(path, e.study, e.trials, e.parameters)
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
