// Package prior reads what was measured before and elsewhere, by auto_tune.sh, vllm bench serve, Optuna or another study, as trials that
// a search can begin with. It never measures and never stores.
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

	"vllmtuner/foreign"
	"vllmtuner/studies"
	"vllmtuner/studies/fence"
	"vllmtuner/studies/optuna"
	"vllmtuner/trial"
	"vllmtuner/trial/slo"
	"vllmtuner/tuner/space"
)

// A Reader reads for one study.
type Reader struct {
	Space *space.Space // its Defaults are the args of every server of the study
	SLO   slo.SLO
	World map[string]string // of the study; see studies.Study
	ID    string            // of the study; "" where it has not begun

	Set         map[string]string // searched flags of the servers, where files do not say them
	Defaults    bool              // files that say no flag are of a server with none of the searched ones
	AnyModel    bool              // take what was measured under another model's name
	OptunaStudy string            // which one of an Optuna file; "" is the only one
}

// A Source is what was read under one name.
type Source struct {
	Name  string // that the user knows it by
	Path  string // that it was read from; of several files read together a name of theirs alone
	World int    // as in studies.Source
	Kind  Kind
	Taken []Taken
	Left  []Left
	Notes []string // what holds for all that was taken
}

// A Kind is who wrote a source.
type Kind string

// The kinds.
const (
	AutoTune  Kind = "auto_tune.sh"
	VLLMBench Kind = "vllm bench serve"
	Optuna    Kind = "Optuna"
	Study     Kind = "tuner"
)

// Taken is a trial with the place that it was read from.
type Taken struct {
	From  string
	Trial studies.Trial
}

// Left is what was read and not taken, and why.
type Left struct{ From, Why string }

// Trials are those that were taken.
func (s *Source) Trials() []studies.Trial {
	all := make([]studies.Trial, len(s.Taken))
	for i, t := range s.Taken {
		all[i] = t.Trial
	}
	return all
}

func (s *Source) leave(from, format string, args ...any) {
	s.Left = append(s.Left, Left{from, oneLine(fmt.Sprintf(format, args...))})
}

// oneLine joins what errors.Join has put on lines.
func oneLine(text string) string { return strings.Join(strings.Split(text, "\n"), "; ") }

// take adds a trial of a point that was measured with this result, if it can have been.
func (s *Source) take(r *Reader, from string, point space.Point, result trial.Result, probes []trial.Probe) {
	if why := implausible(result, probes); why != "" {
		s.leave(from, "%s", why)
		return
	}
	s.Taken = append(s.Taken, Taken{from, studies.Trial{
		Number: -1, Origin: studies.Prior, State: studies.Done, Source: s.Name, Point: point, Args: r.Space.Args(point), Result: result, Probes: probes,
	}})
}

// Read reads all paths. An error is about a file that cannot be read as what it seems to be; what is well written and of no use to the
// study is left out and said. Results of vllm bench serve are read together, whatever files they are in: the rates of one config are one
// trial.
func (r *Reader) Read(paths []string) ([]Source, error) {
	var all []Source
	var benches, names []string
	paths, err := once(paths)
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		found, err := look(path)
		if err != nil {
			return nil, err
		}
		var sources []Source
		switch found.kind {
		case Study:
			sources, err = r.readStudy(path)
		case Optuna:
			sources, err = r.readOptuna(path)
		case AutoTune:
			source := Source{Name: path, Path: path, Kind: AutoTune}
			for _, file := range found.files {
				err = errors.Join(err, r.readAutoTune(&source, file))
			}
			sources = []Source{source}
		case VLLMBench:
			benches, names = append(benches, found.files...), append(names, path)
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
	name, err := together(names)
	if err != nil {
		return nil, err
	}
	source := Source{Name: name, Path: name, Kind: VLLMBench}
	err = r.readBenches(&source, slices.Compact(slices.Sorted(slices.Values(benches))))
	return append(all, source), err
}

// once returns the paths, each file or folder under its first name alone, however it is spelled and whatever links lead to it.
func once(paths []string) (all []string, err error) {
	seen := map[string]bool{}
	for _, path := range paths {
		path = filepath.Clean(path)
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

// realPath is the one name of what is there, wherever it is asked for and whatever links lead to it.
func realPath(path string) (string, error) {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", foreign.Unreadable(path, err)
	}
	return filepath.Abs(real)
}

// together is one name for several paths, such as "runs/1.json and 2 more #3f2a9c1b". What is imported replaces what has its name, so that the
// same files have one name in any order and from any folder, and other files never have it: the number is a hash of all their real paths.
func together(paths []string) (string, error) {
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
	sum := sha256.Sum256([]byte(strings.Join(all, "\x00"))) // which is in no path
	return fmt.Sprintf("%s and %d more #%x", filepath.Join(filepath.Base(dir), file), len(all)-1, sum[:4]), nil
}

// found is what lies at a path.
type found struct {
	kind  Kind
	files []string
}

// The names of files and folders that tell who wrote a folder.
const (
	resultFile = "result.txt" // auto_tune.sh
	jsonFile   = ".json"      // vllm bench serve
)

// look says what a path is by what lies there.
func look(path string) (found, error) {
	info, err := os.Stat(path)
	if err != nil {
		return found{}, foreign.Unreadable(path, err)
	}
	switch {
	case info.Mode().IsRegular():
		return lookAtFile(path)
	case !info.IsDir():
		_, err := foreign.Open(path) // says what it is
		return found{}, err
	}
	if _, err := os.Stat(filepath.Join(path, fence.SlotDir)); err == nil {
		return found{kind: Study}, nil
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
		return found{}, err
	case len(results) > 0: // profiles of auto_tune.sh are JSON too
		return found{AutoTune, results}, nil
	case len(benches) > 0:
		return found{VLLMBench, benches}, nil
	}
	return found{}, fmt.Errorf("%s holds neither a %s of auto_tune.sh, nor a %s file of vllm bench serve --save-result, nor a study; name the folder or file that does",
		path, resultFile, jsonFile)
}

func lookAtFile(path string) (found, error) {
	isSQLite, err := optuna.IsSQLite(path)
	if err != nil {
		return found{}, err
	}
	switch {
	case isSQLite:
		isOurs, err := studies.IsFile(path)
		if err != nil {
			return found{}, fmt.Errorf("%s: %w", path, err)
		}
		if isOurs {
			return found{kind: Study}, nil
		}
		return found{kind: Optuna}, nil
	case filepath.Ext(path) == jsonFile:
		return found{VLLMBench, []string{path}}, nil
	}
	return found{AutoTune, []string{path}}, nil
}

// mostBytes is more than any result has; --save-detailed of 100,000 requests has 300 MB.
const mostBytes = 1 << 30

// readFile reads a regular file of a reasonable size.
func readFile(path string) ([]byte, error) { return foreign.Read(path, mostBytes) }
