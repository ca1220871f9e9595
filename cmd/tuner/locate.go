package main

import (
	"os"
	"path/filepath"
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
	arg, err := oneArg(c, studyArgument)
	if err != nil {
		return studies.Study{}, err
	}
	dir, err := locate(c.String("root"), arg)
	if err != nil {
		return studies.Study{}, err
	}
	return studies.ReadSnapshot(dir)
}

// locate returns the directory of a study that is named by its name, its study file, or its directory.
func locate(root, arg string) (string, error) {
	if strings.HasSuffix(arg, ".yaml") || strings.HasSuffix(arg, ".yml") {
		file, err := studyfile.Read(arg)
		if err != nil {
			return "", err
		}
		return filepath.Join(root, file.Name), nil
	}
	if info, err := os.Stat(arg); err == nil && info.IsDir() && strings.ContainsRune(arg, filepath.Separator) {
		return arg, nil
	}
	if err := studies.ValidName(arg); err != nil {
		return "", usageError{err}
	}
	return filepath.Join(root, arg), nil
}

// reportOptions gives a report what the study's own file says of it.
func reportOptions(study studies.Study) report.Options {
	o := report.Options{Now: time.Now()}
	if file, err := studyfile.Parse(study.Name, []byte(study.File)); err == nil { // an older version's file is no reason to print nothing
		o.Planned, o.Margin = file.Budget.Trials, file.Advice.Margin
	}
	return o
}
