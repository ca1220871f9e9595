package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"

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
You can export a study while it runs; this never disturbs it.

  optuna  a SQLite file in the form of Optuna 4 and 5: for Optuna Dashboard,
          for its plots, or to continue with Optuna
  csv     one row per trial, or with --probes one row per probe
  json    the study as one object: its settings, events, trials and probes
  sqlite  everything that is stored, as one database (docs/schema.md)

Examples:
  tuner export llama70b --format optuna -o llama70b.db
  tuner export llama70b --format csv > trials.csv
  tuner export llama70b --format sqlite -o llama70b.db
See docs/export.md.`,
		Flags: []cli.Flag{
			rootFlag(),
			&cli.StringFlag{Name: "format", Aliases: []string{"f"}, Usage: "`format` of the file: " + exportFormats},
			&cli.StringFlag{Name: "output", Aliases: []string{"o"}, Usage: "write to `FILE`; without it, csv and json go to standard output"},
			&cli.BoolFlag{Name: "probes", Usage: "with csv: one row per probe"},
			&cli.BoolFlag{Name: "force", Usage: "replace FILE if it exists"},
		},
		Action: onDisk(exportAction),
	}
}

// The formats of --format.
const (
	asOptuna = "optuna"
	asCSV    = "csv"
	asJSON   = "json"
	asSQLite = "sqlite"

	exportFormats = "optuna, csv, json or sqlite"
)

func exportAction(c *cli.Context) error {
	format, path := c.String("format"), c.String("output")
	if !c.IsSet("format") {
		return usage("export needs --format: %s", exportFormats)
	}
	if err := oneOf("format", format, asOptuna, asCSV, asJSON, asSQLite); err != nil {
		return err
	}
	switch {
	case c.Bool("probes") && format != asCSV:
		return usage("--probes works with --format csv only; the other formats always include the probes")
	case path == "" && format != asCSV && format != asJSON:
		return usage("--format %s writes a file: name it with -o FILE", format)
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
	write := exportTrials
	if format == asSQLite {
		write = exportDatabase
	}
	study, err := write(c, dir)
	if err == nil && path != "" {
		fmt.Fprintf(c.App.ErrWriter, "wrote %s to %s\n", render.Count(len(study.Trials), "trial"), path)
	}
	warnReader(c.App.ErrWriter, dir, study)
	return err
}

// exportDatabase copies the study in dir to the file that the command line names.
func exportDatabase(c *cli.Context, dir string) (study studies.Study, err error) {
	var unread error // set only if the study itself cannot be read
	err = writeNew(c.String("output"), c.Bool("force"), func(temp string) error {
		if study, err = studies.Export(c.Context, dir, temp); errors.Is(err, studies.ErrUnusable) {
			unread = err
		}
		return err
	})
	return study, cmp.Or(unread, err)
}

// exportTrials writes the trials of the study in dir to the file that the command line names, or to standard output.
// The trials are read one at a time. Only JSON includes the measurements of each second of a probe.
func exportTrials(c *cli.Context, dir string) (studies.Study, error) {
	format, path := c.String("format"), c.String("output")
	return studies.ReadEach(dir, format == asJSON, func(study studies.Study, trials iter.Seq2[studies.Trial, error]) error {
		var parameters []space.Parameter
		file, fileErr := studyfile.Parse(study.Name, []byte(study.File))
		if fileErr == nil {
			parameters = file.Parameters
		}
		write := func(w io.Writer) error {
			if format == asJSON {
				return export.WriteJSON(w, study, trials)
			}
			return exportCSV(w, study, trials, parameters, c.Bool("probes"))
		}
		if path == "" {
			printDocuments(c, format)
			return write(c.App.Writer)
		}
		return writeNew(path, c.Bool("force"), func(temp string) error {
			switch {
			case format != asOptuna:
				return writeText(temp, write)
			case fileErr != nil:
				return fmt.Errorf("the ranges of the searched flags are unknown, because the stored study file is of another version of tuner: %w; export the study with that version", fileErr)
			}
			return optuna.Write(temp, study, trials, parameters)
		})
	})
}

// readResults reads a study's trials with their results and without their probes.
func readResults(dir string) (studies.Study, error) {
	return studies.ReadSummary(dir, func(studies.Study) []int { return nil })
}

func exportCSV(w io.Writer, study studies.Study, trials iter.Seq2[studies.Trial, error], parameters []space.Parameter, probes bool) error {
	var flags []string
	for _, p := range parameters {
		flags = append(flags, p.Name)
	}
	if probes {
		return export.WriteProbes(w, study, trials, flags)
	}
	return export.WriteTrials(w, study, trials, flags)
}

func writeText(path string, write func(io.Writer) error) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}
