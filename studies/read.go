package studies

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/xrash/smetrics"

	"vllmtuner/foreign"
	"vllmtuner/render"
	"vllmtuner/studies/fence"
)

// ReadSnapshot returns the study in a directory as its owner last published it. It uses neither the live database nor
// locks, and writes nothing. So it cannot delay an owner, and it works on a read-only disk. If an owner was killed, the
// commits of its last second may not be published. A resumed study has them.
func ReadSnapshot(dir string) (Study, error) { return readPublished(dir, load) }

// ReadSummary is like ReadSnapshot, but faster for a long study. A trial has no Probes. Its Result lacks Tail, Notes,
// Cache and Ended. Its Capacity lacks Why, Probes, Pieces, Limited and Steps. Its Facts have only Version, StartUp,
// KVCacheTokens and Simulated.
//
// ReadSummary calls selectTrials with this summary. Then it reads the results and probes of the trials whose numbers
// selectTrials returns. Even those trials lack Series, Sketches and Server, and their checks lack Each.
func ReadSummary(dir string, selectTrials func(Study) []int) (Study, error) {
	return readPublished(dir, func(db *sql.DB) (Study, error) { return summarize(db, selectTrials, short) })
}

func readPublished(dir string, loadFrom func(*sql.DB) (Study, error)) (Study, error) {
	_, study, err := newest(dir, loadFrom)
	return study, explainToReader(dir, err)
}

// explainToReader adds to an error what a reader can do if no snapshot can be read.
func explainToReader(dir string, err error) error {
	switch {
	case errors.Is(err, errNone):
		return missingError(dir)
	case err != nil && (isDamage(err) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, foreign.ErrNoFile)):
		err = fmt.Errorf("%w; no older snapshot can be read either: `tuner run` publishes the study again if its database is undamaged", err)
	}
	return markUnusable(err)
}

// newest reads the newest snapshot with the function loadFrom, and returns the snapshot's name too. If there is no
// snapshot, the error wraps errNone. If the newest snapshot cannot be read, it reads an older one.
func newest(dir string, loadFrom func(*sql.DB) (Study, error)) (name snapshot, study Study, err error) {
	return newestBy(dir, func(n snapshot) (Study, error) { return n.read(dir, loadFrom) })
}

// newestBy is like newest, but calls the given function to read a snapshot.
func newestBy(dir string, read func(snapshot) (Study, error)) (name snapshot, study Study, err error) {
	var all []snapshot
	for attempt := range maxReads {
		if attempt > 0 {
			time.Sleep(firstPause << attempt)
		}
		if all, err = snapshots(dir); err != nil {
			return snapshot{}, Study{}, err
		}
		if study, err = read(all[0]); err == nil {
			return all[0], study, nil
		}
		err = all[0].unreadError(dir, err)
		if isDamage(err) { // another attempt would find the same damage
			break
		}
	}
	if _, newer := errors.AsType[newerError](err); newer {
		return snapshot{}, Study{}, err
	}
	for _, older := range all[1:] { // the newest snapshot is damaged, or was not copied with the others
		if study, olderErr := read(older); olderErr == nil {
			study.Behind = err.Error()
			return older, study, nil
		}
	}
	return snapshot{}, Study{}, err
}

// unreadError returns the error for a snapshot that could not be read. If a file is missing, the error has the file's
// name once, and leaves out the system call.
func (n snapshot) unreadError(dir string, err error) error {
	path := n.path(dir)
	if of, ok := err.(*fs.PathError); ok && errors.Is(of, fs.ErrNotExist) {
		err = of.Err
		if of.Path != path {
			err = fmt.Errorf("its base %s: %w", of.Path, of.Err)
		}
	}
	return fmt.Errorf("read %s: %w", path, err)
}

// A reader tries maxReads times to read the newest snapshot. The owner may publish three newer ones and remove that
// snapshot before the reader opens it. On a busy NFS client that happened three times in a row. Each pause is twice as
// long as the one before; together the pauses take 1.3 s.
const (
	maxReads   = 8
	firstPause = 5 * time.Millisecond
)

// read reads a snapshot with the function loadFrom. If the snapshot has an older schema, it reads a converted copy.
func (n snapshot) read(dir string, loadFrom func(*sql.DB) (Study, error)) (study Study, err error) {
	defer func() { err = explainFile(err, n.baseSnapshot().path(dir), n.path(dir)) }()
	if err := n.check(dir); err != nil {
		return Study{}, err
	}
	return inFile(n.baseSnapshot().path(dir), publishedOptions, func(db *sql.DB) (study Study, err error) {
		version, err := schemaVersion(db)
		if err == nil && !n.isBase() {
			err = join(db, n.path(dir), version)
		}
		switch {
		case err != nil:
			return Study{}, err
		case version == 0:
			err = sql.ErrNoRows
		case version < len(migrations):
			study, err = readCopy(func(path string) error { return n.write(context.Background(), dir, path) }, loadFrom)
		default:
			study, err = loadFrom(db)
		}
		if errors.Is(err, sql.ErrNoRows) { // a published snapshot always has a study
			err = damagedf("no study is in it")
		}
		if err == nil && version >= hasSums && study.ID != "" && study.Commits != n.commits {
			err = damagedf("it has %s, and its name says %d", render.Count(int(study.Commits), "commit"), n.commits)
		}
		return study, err
	})
}

// readCopy reads a study from a temporary copy. The function makeCopy writes this copy, in the newest schema.
func readCopy(makeCopy func(path string) error, loadFrom func(*sql.DB) (Study, error)) (study Study, err error) {
	temp, err := os.MkdirTemp("", "tuner-snapshot-")
	if err != nil {
		return Study{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	path := filepath.Join(temp, fence.Database)
	if err := makeCopy(path); err != nil {
		return Study{}, err
	}
	return inFile(path, publishedOptions, loadFrom)
}

// missingError returns the error for a directory without a snapshot. It says why there is none, and names similar
// studies.
func missingError(dir string) error {
	if isStudy(dir) {
		return fmt.Errorf("study %s has no snapshot yet: its first run was killed while it began, or its snapshots were removed; run it again", dir)
	}
	root, name := filepath.Split(filepath.Clean(dir))
	names, err := List(root)
	switch {
	case err != nil:
		return unusablef("no study %s: %w", dir, err)
	case len(names) == 0:
		return unusablef("no study %q: the directory %s holds no study at all; to use another directory, give --root", name, filepath.Clean(root))
	}
	near := slices.MaxFunc(names, func(a, b string) int { return cmp.Compare(nearness(a, name), nearness(b, name)) })
	hint := "it holds "
	if nearness(near, name) > 0.8 { // unrelated names may also reach 0.8
		hint = fmt.Sprintf("did you mean %q? The directory holds ", near)
	}
	return unusablef("no study %q in %s; %s%s", name, filepath.Clean(root), hint, strings.Join(names, ", "))
}

// nearness is 1 for equal names, and 0 for names without a common letter.
func nearness(a, b string) float64 { return smetrics.JaroWinkler(a, b, 0.7, 4) }

var nameRule = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

// ValidName returns an error if a study may not have the name. Names become directories, Kubernetes labels and metric
// labels. So they are 1 to 63 lower-case letters, digits, dots and dashes, with a letter or digit first and last. A
// name that ends like a study file would be taken for a file.
func ValidName(name string) error {
	switch {
	case !nameRule.MatchString(name):
		return unusablef("study name %q: use 1 to 63 of a-z, 0-9, dot and dash, a letter or digit first and last, such as llama70b-h200", name)
	case strings.HasSuffix(name, ".yaml"), strings.HasSuffix(name, ".yml"):
		return unusablef("study name %q: it would be taken for a study file; use one without %s", name, filepath.Ext(name))
	}
	return nil
}
