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

	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/report"
	"vllmtuner/tuner/insight"
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

// readSummary reads a study for a report. The function withProbes returns the numbers of the trials whose probes are
// needed. Of these probes, readSummary leaves out the long lists, such as Series.
func readSummary(c *cli.Context, warnings io.Writer, withProbes func(studies.Study) []int) (studies.Study, error) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // no garbage collection here: it would be a third of the time for reading a long study
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
	o, _ := storedOptions(study)
	return o
}

// bestOptions returns the options of a report on the best trial. The study must have the trials of insight.Whole in
// full.
func bestOptions(study studies.Study, w io.Writer) report.Options {
	o, file := storedOptions(study)
	o.Width = render.Columns(w)
	if file == nil {
		return o
	}
	if s, err := file.Space(); err == nil { // a space from another version of tuner may not be legal here; the report then does without it
		o.Insight = insight.Derive(study, s)
	}
	return o
}

// storedOptions returns the options that the stored study file gives, and the file. The file is nil if it does not
// parse: another version of tuner may have written it.
func storedOptions(study studies.Study) (o report.Options, file *studyfile.File) {
	o = report.Options{Now: time.Now()}
	file, err := studyfile.Parse(study.Name, []byte(study.File))
	if err != nil {
		return o, nil
	}
	o.Planned, o.Margin = file.Budget.Planned(), file.Advice.Margin
	return o, file
}
