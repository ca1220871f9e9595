// Package prior reads results of auto_tune.sh, vllm bench serve, Optuna or another study, as trials that a search can
// begin with. It never measures and never stores.
package prior

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/samber/lo"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/studies"
	"vllmtuner/studies/fence"
	"vllmtuner/studies/optuna"
	"vllmtuner/studies/report"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// A Reader reads results from elsewhere, for one study.
type Reader struct {
	Space *space.Space // the searched flags; Space.Defaults are the args of every server of the study
	SLO   slo.SLO
	World map[string]string // world of the study; see studies.Study
	ID    string            // ID of the study; "" if it has not begun

	Set         map[string]string // values of searched flags, for files that do not have them
	Defaults    bool              // take a file without flags as the result of a server without any of the searched flags
	AnyModel    bool              // also take results of models with another name
	OptunaStudy string            // name of the study in an Optuna file; "" if there is only one
}

// A Source is a set of results that was read under one name: a file, several files together, or one world of a study.
type Source struct {
	Name  string // name for the user
	Path  string // path of the file or folder; if several files were read together, one name for all of them
	World int    // number of the source's world; see studies.Source
	Kind  Kind
	Taken []studies.Trial
	Left  []Left
	Notes []string // notes that hold for all taken trials
}

// A Kind names the program that wrote a source.
type Kind string

// The kinds of sources.
const (
	autoTune   Kind = "auto_tune.sh"
	vllmBench  Kind = "vllm bench serve"
	optunaFile Kind = "Optuna"
	tunerStudy Kind = "tuner"
)

// A Left names a result that was left out, and says why.
type Left struct{ From, Why string }

func (s *Source) leave(from, format string, args ...any) {
	s.Left = append(s.Left, Left{from, oneLine(fmt.Sprintf(format, args...))})
}

// oneLine puts all lines of a text on one line, such as the errors of an errors.Join.
func oneLine(text string) string { return strings.Join(strings.Split(text, "\n"), "; ") }

// take adds a trial of a point to the taken trials. If the result is implausible, take leaves the trial out.
func (s *Source) take(r *Reader, from string, point space.Point, result trial.Result, probes []trial.Probe) {
	if why := whyImplausible(result, probes); why != "" {
		s.leave(from, "%s", why)
		return
	}
	s.Taken = append(s.Taken, studies.Trial{
		Number: -1, Origin: studies.Prior, State: studies.Done, Source: s.Name, Point: point, Args: r.Space.Args(point), Result: result, Probes: probes,
	})
}

const maxRows = 10 // how many taken trials Text shows, and how many reasons why results were left out

// Text lists the trials that were taken from the source, the best first, and says why others were left out. Its lines
// have at most width columns.
func (s *Source) Text(width int) string {
	t := render.Text{Width: width}
	t.Paragraph(fmt.Sprintf("%s (%s): %d taken, %d left out", s.Name, s.Kind, len(s.Taken), len(s.Left)), "  ")
	t.WriteString(report.PriorTable(s.Taken, maxRows, width))
	for _, r := range reasons(s.Left) {
		t.Paragraph(fmt.Sprintf("  left out: %s: %s", r.From, r.Why), "    ")
	}
	for _, note := range s.Notes {
		t.Paragraph("  note: "+note, "    ")
	}
	return t.String()
}

// reasons returns the left-out results, grouped by reason.
func reasons(left []Left) (all []Left) {
	for _, group := range lo.PartitionBy(left, func(l Left) string { return l.Why }) {
		first := group[0]
		if more := len(group) - 1; more > 0 {
			first.From += fmt.Sprintf(" and %d more", more)
		}
		all = append(all, first)
	}
	if more := len(all) - maxRows; more > 0 {
		all = append(all[:maxRows], Left{fmt.Sprintf("%d more", more), "for other reasons"})
	}
	return all
}

// Read reads all paths. It returns an error for a malformed file. Results that the study cannot use are left out, with
// the reason in Source.Left. All results of vllm bench serve make one source. In this source, all runs of one point, at
// several rates, make one trial.
func (r *Reader) Read(paths []string) ([]Source, error) {
	var all []Source
	var benches, names []string
	paths, err := distinctPaths(paths)
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		kind, files, err := identify(path)
		if err != nil {
			return nil, err
		}
		var sources []Source
		switch kind {
		case tunerStudy:
			sources, err = r.readStudy(path)
		case optunaFile:
			sources, err = r.readOptuna(path)
		case autoTune:
			source := Source{Name: path, Path: path, Kind: autoTune}
			for _, file := range files {
				err = errors.Join(err, r.readAutoTune(&source, file))
			}
			sources = []Source{source}
		case vllmBench:
			benches, names = append(benches, files...), append(names, path)
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, sources...)
	}
	if len(benches) == 0 {
		return all, nil
	}
	name, err := jointName(names)
	if err != nil {
		return nil, err
	}
	source := Source{Name: name, Path: name, Kind: vllmBench}
	err = r.readBenches(&source, slices.Compact(slices.Sorted(slices.Values(benches))))
	return append(all, source), err
}

// distinctPaths returns each path once. It leaves out a path that leads to the same file or folder as an earlier path.
func distinctPaths(paths []string) (all []string, err error) {
	seen := map[string]bool{}
	for _, path := range paths {
		path = studies.ImportPath(filepath.Clean(path))
		real, err := realPath(path)
		if err != nil {
			return nil, err
		}
		if !seen[real] {
			all = append(all, path)
		}
		seen[real] = true
	}
	return all, nil
}

// realPath returns the absolute path without symbolic links.
func realPath(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", foreign.Unreadable(path, err)
	}
	return filepath.Abs(real)
}

// jointName returns one name for several paths, such as "runs/1.json and 2 more #3f2a9c1b". An import replaces earlier
// priors (trials from elsewhere) of the same name. So the name ends with a hash of all real paths, which depends
// neither on their order nor on the current folder.
func jointName(paths []string) (string, error) {
	if len(paths) == 1 {
		return paths[0], nil
	}
	all := make([]string, len(paths))
	for i, path := range paths {
		var err error
		if all[i], err = realPath(path); err != nil {
			return "", err
		}
	}
	slices.Sort(all)
	dir, file := filepath.Split(all[0])
	sum := sha256.Sum256([]byte(strings.Join(all, "\x00"))) // no path contains a NUL
	return fmt.Sprintf("%s and %d more #%x", filepath.Join(filepath.Base(dir), file), len(all)-1, sum[:4]), nil
}

// Names and endings of files, which show what program wrote a folder.
const (
	resultFile = "result.txt" // auto_tune.sh
	jsonFile   = ".json"      // vllm bench serve
)

// identify finds out what kind of source a path is, and which files it has.
func identify(path string) (kind Kind, files []string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", nil, foreign.Unreadable(path, err)
	}
	switch {
	case info.Mode().IsRegular():
		return identifyFile(path)
	case !info.IsDir():
		_, err := foreign.Open(path) // Open returns an error that says what the path is
		return "", nil, err
	}
	if _, err := os.Stat(filepath.Join(path, fence.SlotDir)); err == nil {
		return tunerStudy, nil, nil
	}
	var results, benches []string
	err = filepath.WalkDir(path, func(file string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && file != path:
			return filepath.SkipDir
		case entry.IsDir():
		case entry.Name() == resultFile:
			results = append(results, file)
		case filepath.Ext(file) == jsonFile:
			benches = append(benches, file)
		}
		return nil
	})
	switch {
	case err != nil:
		return "", nil, err
	case len(results) > 0: // the JSON files of such a folder are profiles that auto_tune.sh wrote
		return autoTune, results, nil
	case len(benches) > 0:
		return vllmBench, benches, nil
	}
	return "", nil, fmt.Errorf("%s has no results; give a study, a %s of auto_tune.sh, a %s file of vllm bench serve --save-result, or a folder with such files",
		path, resultFile, jsonFile)
}

func identifyFile(path string) (Kind, []string, error) {
	isSQLite, err := optuna.IsSQLite(path)
	if err != nil {
		return "", nil, err
	}
	switch {
	case isSQLite:
		isOurs, err := studies.IsFile(path)
		if err != nil {
			return "", nil, fmt.Errorf("%s: %w", path, err)
		}
		if isOurs {
			return tunerStudy, nil, nil
		}
		return optunaFile, nil, nil
	case filepath.Ext(path) == jsonFile:
		return vllmBench, []string{path}, nil
	}
	return autoTune, []string{path}, nil
}

// maxBytes is larger than any result: with --save-detailed, 100,000 requests need 300 MB.
const maxBytes = 1 << 30

// readFile reads a regular file of at most maxBytes.
func readFile(path string) ([]byte, error) { return foreign.Read(path, maxBytes) }
