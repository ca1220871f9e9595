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

// readStudy returns the published snapshot of the study that the command's argument names.
func readStudy(c *cli.Context) (studies.Study, error) {
	dir, err := studyDir(c)
	if err != nil {
		return studies.Study{}, err
	}
	study, err := studies.ReadLive(c.Context, dir, studies.ReadSnapshot)
	warnReader(c.App.ErrWriter, dir, study)
	return study, err
}

// warnReader warns that the study in dir has another name, or is shown from an older snapshot. Without a study it does nothing.
func warnReader(w io.Writer, dir string, study studies.Study) {
	if other := studies.OtherName(dir, study); other != "" {
		fmt.Fprintln(w, "warning:", other)
	}
	if study.Behind != "" {
		fmt.Fprintf(w, "warning: %s\nshown is the snapshot of %s; the rest appears when the study continues\n",
			study.Behind, study.Updated.Local().Format(time.DateTime))
	}
}

// readSummary reads what a report needs: the probes of only those trials that whole names, and no long lists in them.
func readSummary(c *cli.Context, warnings io.Writer, whole func(studies.Study) []int) (studies.Study, error) {
	dir, err := studyDir(c)
	if err != nil {
		return studies.Study{}, err
	}
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // saves a third of the time for a long study; the command ends soon
	study, err := studies.ReadLive(c.Context, dir, func(dir string) (studies.Study, error) { return studies.ReadSummary(dir, whole) })
	warnReader(warnings, dir, study)
	return study, err
}

// studyDir is the directory of the study that the command's argument names.
func studyDir(c *cli.Context) (string, error) {
	arg, err := oneArg(c, studyArgument)
	if err != nil {
		return "", err
	}
	return locate(c.String("root"), arg)
}

// locate returns the directory of a study that is named by its name, its study file, or its directory.
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

// reportOptions takes a report's options from the study's own file.
func reportOptions(study studies.Study) report.Options {
	o := report.Options{Now: time.Now()}
	if file, err := studyfile.Parse(study.Name, []byte(study.File)); err == nil { // the file of another version may not parse
		o.Planned, o.Margin = file.Budget.Trials, file.Advice.Margin
	}
	return o
}
