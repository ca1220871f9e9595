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
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/foreign"
	"vllmtuner/studies/fence"
	"vllmtuner/studies/rights"
)

// TrashDir is the directory for deleted studies, below the root directory. It is not a valid name of a study.
const TrashDir = ".trash"

// List returns the sorted names of the studies in a root directory. A root that does not exist has no studies.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(cmp.Or(root, "."))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, markUnusable(fmt.Errorf("list the studies: %w", err))
	}
	var names []string
	inStudy, _ := hasStudyFiles(root) // if root is itself a study, the directories in it are epochs: they have databases, but are no studies
	for _, e := range entries {
		if isStudy(filepath.Join(root, e.Name())) && !(inStudy && fence.IsEpoch(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// isStudy reports whether a directory holds a study, or may hold a study that this user cannot read.
func isStudy(dir string) bool {
	if info, err := os.Stat(filepath.Join(dir, fence.Database)); err == nil && info.Mode().IsRegular() { // a study of schema 1 has only a database
		return true
	}
	found, hidden := hasStudyFiles(dir)
	return found || hidden && ValidName(filepath.Base(dir)) == nil // the name rule excludes directories such as lost+found
}

// hasStudyFiles reports whether it found slots or snapshots in a directory. If this user is not permitted to look for
// them, hidden is true.
func hasStudyFiles(dir string) (found, hidden bool) {
	for sign, of := range map[string]func(name string) bool{
		fence.SlotDir: fence.IsSlot,
		snapshotDir:   func(name string) bool { _, ok := parseSnapshot(name); return ok },
	} {
		entries, err := os.ReadDir(filepath.Join(dir, sign))
		found = found || slices.ContainsFunc(fileNames(entries), of)
		hidden = hidden || errors.Is(err, fs.ErrPermission)
	}
	return found, hidden
}

// OtherName returns a warning if a directory has another name than its study, and "" otherwise. There is no warning if
// a link to the directory has the study's name. In the trash, the name of the directory need only begin with the
// study's name, because Delete appends a time.
func OtherName(dir string, study Study) string {
	path, err := filepath.Abs(dir)
	if err != nil || study.Name == "" {
		return ""
	}
	names := []string{filepath.Base(path)}
	if path, err = filepath.EvalSymlinks(path); err == nil {
		names = append(names, filepath.Base(path))
	}
	isDeleted := filepath.Base(filepath.Dir(path)) == TrashDir && strings.HasPrefix(filepath.Base(path), study.Name+"-")
	if slices.Contains(names, study.Name) || isDeleted {
		return ""
	}
	return fmt.Sprintf("%s holds the study %q, and these are its figures; if the directory was renamed or copied, name it %s again; "+
		"if another study's files were copied into it, restore its own files", dir, study.Name, study.Name)
}

// Delete moves a study into the trash of its root directory, and returns the new path. No file is lost. If the study
// has an owner, the error wraps ErrOwned. For takeoverAfter, see Options.TakeoverAfter.
func Delete(ctx context.Context, dir string, takeoverAfter time.Duration) (to string, err error) {
	defer func() { err = markUnusable(err) }()
	if !isStudy(dir) {
		return "", missingError(dir)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", err
	}
	if to, err := os.Readlink(dir); err == nil {
		return "", unusablef("delete %s: it is a link to %s: delete the study there, or remove the link alone with rm", dir, to)
	}
	if study := Around(dir); study != "" {
		return "", unusablef("delete %s: it is a part of the study in %s: delete that study instead", dir, study)
	}
	if err := checkTrash(filepath.Join(filepath.Dir(dir), TrashDir)); err != nil {
		return "", fmt.Errorf("delete the study in %s: %w", dir, err)
	}
	if to, err = stopAndDiscard(ctx, dir, cmp.Or(takeoverAfter, fence.DefaultTTL)); err != nil {
		return "", fmt.Errorf("delete the study in %s: %w", dir, err)
	}
	return to, nil
}

// stopAndDiscard makes sure that the study has no living owner, and moves the study into the trash before anybody can
// own it.
func stopAndDiscard(ctx context.Context, dir string, ttl time.Duration) (to string, err error) {
	if _, err := checkWrite(dir); err != nil {
		return "", fmt.Errorf("%s cannot be written: %w%s", dir, err, ownerHint(err, dir))
	}
	if err := checkOwn(dir); err != nil {
		return "", err
	}
	folder, err := openFolder(dir)
	if err != nil {
		return "", err
	}
	release, err := fence.Stop(ctx, folder, thisOwner(), ttl)
	if err == nil {
		to, err = discard(dir)
	}
	return to, errors.Join(err, release(), folder.Close())
}

// checkTrash returns an error if nothing can be moved into the trash. It runs before anything is changed.
func checkTrash(trash string) error {
	info, err := os.Lstat(trash)
	if errors.Is(err, fs.ErrNotExist) {
		if err := canWrite(filepath.Dir(trash)); err != nil {
			return fmt.Errorf("the trash, %s, cannot be created: %w%s", trash, err, ownerHint(err, filepath.Dir(trash)))
		}
		return nil
	}
	switch {
	case err != nil:
		return err
	case info.Mode().Type() == fs.ModeSymlink:
		return unusablef("%s is a link, but the trash must be a directory: remove the link", trash)
	case !info.IsDir():
		return unusablef("%s, the trash, is not a directory: move it to another place", trash)
	}
	for _, dir := range []string{trash, filepath.Dir(trash)} { // a move changes both directories
		if err := canWrite(dir); err != nil {
			return fmt.Errorf("%s cannot be written: %w%s", dir, err, ownerHint(err, dir))
		}
	}
	return nil
}

// canWrite returns an error if this user may not create and remove files in a directory.
func canWrite(dir string) error {
	return unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
}

// discard moves a directory into the trash beside it, under a new name.
func discard(dir string) (to string, err error) {
	parent, name := filepath.Split(dir)
	root, err := os.OpenRoot(parent) // so that no name and no link can lead out of the parent
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	if err := root.Mkdir(TrashDir, rights.Dir(parent)); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	to = filepath.Join(TrashDir, name+"-"+time.Now().UTC().Format("20060102T150405.000Z"))
	if _, err := root.Lstat(to); err == nil {
		return "", fmt.Errorf("%s already exists; try again", to)
	}
	if err := root.Rename(name, to); err != nil {
		return "", err
	}
	return filepath.Join(parent, to), errors.Join(syncPath(filepath.Join(parent, TrashDir)), syncPath(parent))
}

// Export writes the published study to a path as one SQLite file (docs/schema.md), checks the file, and returns the
// study's summary. If the newest snapshot is damaged, it exports an older one, and the summary's field Behind says so.
func Export(ctx context.Context, dir, path string) (Study, error) {
	var stopped error
	_, study, err := newestBy(dir, func(n snapshot) (Study, error) {
		if err := n.write(ctx, dir, path); err != nil && !n.toBlame(dir, err) { // the written file is at fault, not the snapshot
			stopped = err
			return Study{}, nil
		} else if err != nil {
			return Study{}, explainSQLite(err)
		}
		return readWritten(path)
	})
	return study, cmp.Or(stopped, explainToReader(dir, err))
}

// toBlame reports whether an error comes from the snapshot. If not, the error comes from the file to which the snapshot
// is written.
func (n snapshot) toBlame(dir string, err error) bool {
	_, newer := errors.AsType[newerError](err)
	of, onPath := errors.AsType[*fs.PathError](err)
	return newer || isDamage(err) || errors.Is(err, foreign.ErrNoFile) || onPath && (of.Path == n.path(dir) || of.Path == n.baseSnapshot().path(dir))
}

// readWritten checks an exported file and returns its summary.
func readWritten(path string) (Study, error) {
	study, err := inFile(path, publishedOptions, func(db *sql.DB) (Study, error) {
		if _, err := checkDatabase(db); err != nil {
			return Study{}, err
		}
		return loadSummary(db)
	})
	return study, explainSQLite(err)
}

// Around returns the directory of the study that contains a path, or "" if no study does. The path itself need not
// exist.
func Around(path string) string {
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	for ; err == nil; dir = filepath.Dir(dir) {
		if found, _ := hasStudyFiles(dir); found {
			return dir
		}
		if dir == filepath.Dir(dir) {
			break
		}
	}
	return ""
}
