package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/studyfile"
)

const studyArgument = "the study's name, its study file, or its directory"

// readStudy reads the study that the command's argument names. It warns if the study has another name or its snapshot
// is old.
func readStudy(c *cli.Context, warnings io.Writer, read func(dir string) (studies.Study, error)) (studies.Study, error) {
	dir, err := studyDir(c)
	if err != nil {
		return studies.Study{}, err
	}
	study, err := studies.ReadLive(c.Context, dir, read)
	warnReader(warnings, dir, study)
	return study, err
}

// warnReader warns if the study in dir has another name, or is shown from an older snapshot. For an empty Study it
// prints nothing.
func warnReader(w io.Writer, dir string, study studies.Study) {
	if other := studies.OtherName(dir, study); other != "" {
		fmt.Fprintln(w, "warning:", other)
	}
	if study.Behind != "" {
		fmt.Fprintf(w, "warning: %s\nthis is the snapshot of %s; later results appear when the study continues\n",
			study.Behind, study.Updated.Local().Format(time.DateTime))
	}
}

// readSummary reads a study for a report. It reads probes only for the trials whose numbers withProbes returns, and
// leaves out their long lists, such as Series.
func readSummary(c *cli.Context, warnings io.Writer, withProbes func(studies.Study) []int) (studies.Study, error) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // garbage collection is off: it takes a third of the time to read a long study
	return readStudy(c, warnings, func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, withProbes) })
}

// studyDir returns the directory of the study that the command's argument names.
func studyDir(c *cli.Context) (string, error) {
	arg, err := oneArg(c, studyArgument)
	if err != nil {
		return "", err
	}
	return locate(c.String("root"), arg)
}

// locate returns the directory of a study. arg is the study's name, its study file, or its directory.
func locate(root, arg string) (string, error) {
	if strings.HasSuffix(arg, ".yaml") || strings.HasSuffix(arg, ".yml") {
		file, err := studyfile.Read(arg)
		if err != nil {
			return "", err
		}
		dir := filepath.Join(root, file.Name)
		return dir, studies.CheckDir(dir)
	}
	dir := arg
	if info, err := os.Stat(arg); err != nil || !info.IsDir() || !strings.ContainsRune(arg, filepath.Separator) {
		if err := studies.ValidName(arg); err != nil {
			return "", usageError{err}
		}
		dir = filepath.Join(root, arg)
	}
	return dir, studies.CheckDir(dir)
}

// reportOptions returns the options of a report, with the budget and margin of the stored study file.
func reportOptions(study studies.Study) report.Options {
	o := report.Options{Now: time.Now()}
	if file, err := studyfile.Parse(study.Name, []byte(study.File)); err == nil { // a study file from another version of tuner may not parse
		o.Planned, o.Margin = file.Budget.Planned(), file.Advice.Margin
	}
	return o
}
