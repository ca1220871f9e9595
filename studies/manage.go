package studies

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/foreign"
	"vllmtuner/studies/fence"
	"vllmtuner/studies/rights"
)

// TrashDir is where the studies of a root directory go that are deleted. No study can have the name.
const TrashDir = ".trash"

// List returns the names of the studies in a root directory, sorted. A root that does not exist has none.
func List(root string) ([]string, error) {
	entries, err := os.ReadDir(cmp.Or(root, "."))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, markUnusable(fmt.Errorf("list the studies: %w", err))
	}
	var names []string
	inStudy, _ := hasStudyFiles(root) // whose epochs are no studies, though they have databases
	for _, e := range entries {
		if isStudy(filepath.Join(root, e.Name())) && !(inStudy && fence.IsEpoch(e.Name())) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// isStudy reports whether a directory holds a study, or may hold one that this user may not look at.
func isStudy(dir string) bool {
	if info, err := os.Stat(filepath.Join(dir, fence.Database)); err == nil && info.Mode().IsRegular() { // the first schema knew no slots
		return true
	}
	found, hidden := hasStudyFiles(dir)
	return found || hidden && ValidName(filepath.Base(dir)) == nil // such as lost+found is nobody's study
}

// hasStudyFiles reports whether a directory holds slots or snapshots, and whether it may hold some that this user may not look at.
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

// Delete moves a study out of its root directory into the trash there, and returns where to. Nothing of it is lost. A study that has an owner
// gives an error that wraps ErrOwned; how long one must have been silent to be taken for dead is as in Options.
func Delete(ctx context.Context, dir string, takeoverAfter time.Duration) (to string, err error) {
	defer func() { err = markUnusable(err) }()
	if !isStudy(dir) {
		return "", missing(dir)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return "", err
	}
	if to, err := os.Readlink(dir); err == nil {
		return "", unusablef("delete %s: it is a link to %s: delete the study there, or remove the link alone with rm", dir, to)
	}
	if study := Around(dir); study != "" {
		return "", unusablef("delete %s: it is a part of the study in %s: delete that, or nothing", dir, study)
	}
	if err := checkTrash(filepath.Join(filepath.Dir(dir), TrashDir)); err != nil {
		return "", fmt.Errorf("delete the study in %s: %w", dir, err)
	}
	if to, err = stopAndDiscard(ctx, dir, cmp.Or(takeoverAfter, fence.DefaultTTL)); err != nil {
		return "", fmt.Errorf("delete the study in %s: %w", dir, err)
	}
	return to, nil
}

// stopAndDiscard moves a study into the trash that nobody writes to any more, and that nobody can take before it is there.
func stopAndDiscard(ctx context.Context, dir string, ttl time.Duration) (to string, err error) {
	if _, err := checkWrite(dir); err != nil {
		return "", fmt.Errorf("%s cannot be written: %w%s", dir, err, whose(err, dir))
	}
	if err := checkOwn(dir); err != nil {
		return "", err
	}
	mount, err := fence.MountOf(dir)
	if err != nil {
		return "", err
	}
	folder, err := fence.OpenFolder(dir, mount.Locks())
	if err != nil {
		return "", err
	}
	release, err := fence.Stop(ctx, folder, thisOwner(), ttl)
	if err == nil {
		to, err = discard(dir)
	}
	return to, errors.Join(err, release(), folder.Close())
}

// checkTrash says no to a trash that nothing can be moved into, before the study's owner is asked to go.
func checkTrash(trash string) error {
	info, err := os.Lstat(trash)
	if errors.Is(err, fs.ErrNotExist) {
		if err := canWrite(filepath.Dir(trash)); err != nil {
			return fmt.Errorf("the trash, %s, cannot be made: %w%s", trash, err, whose(err, filepath.Dir(trash)))
		}
		return nil
	}
	switch {
	case err != nil:
		return err
	case info.Mode().Type() == fs.ModeSymlink:
		return unusablef("%s is a link, and a study is moved into a directory beside it alone: remove the link", trash)
	case !info.IsDir():
		return unusablef("%s, into which studies are moved, is not a directory: move it away", trash)
	}
	for _, dir := range []string{trash, filepath.Dir(trash)} { // from the one into the other
		if err := canWrite(dir); err != nil {
			return fmt.Errorf("%s cannot be written: %w%s", dir, err, whose(err, dir))
		}
	}
	return nil
}

// canWrite says whether this user may make and remove names in a directory.
func canWrite(dir string) error {
	return unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK|unix.X_OK, unix.AT_EACCESS)
}

// discard moves a directory into the trash beside it, under a name that nothing there has.
func discard(dir string) (to string, err error) {
	parent, name := filepath.Split(dir)
	root, err := os.OpenRoot(parent) // whatever the name is, and wherever links lead, nothing outside is touched
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	if err := root.Mkdir(TrashDir, rights.Dir(parent)); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	to = filepath.Join(TrashDir, name+"-"+time.Now().UTC().Format("20060102T150405.000Z"))
	if _, err := root.Lstat(to); err == nil {
		return "", fmt.Errorf("%s is there already; try again", to)
	}
	if err := root.Rename(name, to); err != nil {
		return "", err
	}
	return filepath.Join(parent, to), errors.Join(syncPath(filepath.Join(parent, TrashDir)), syncPath(parent))
}

// Export writes the study in a directory, as it was last published, to a path as one SQLite file, and returns what its trials came to: see
// docs/schema.md. What was written is looked through before it counts. Where the newest snapshot is damaged, one before it is better than none, which
// the Study says.
func Export(ctx context.Context, dir, path string) (Study, error) {
	var stopped error
	_, study, err := newestBy(dir, func(n snapshot) (Study, error) {
		if err := n.writeNewest(ctx, dir, path); err != nil && !n.toBlame(dir, err) { // with another snapshot it would be the same
			stopped = err
			return Study{}, nil
		} else if err != nil {
			return Study{}, explainSQLite(err)
		}
		return readWritten(path)
	})
	return study, cmp.Or(stopped, explainToReader(dir, err))
}

// toBlame reports whether a snapshot, and not the file that it was written to, is what an error is about.
func (n snapshot) toBlame(dir string, err error) bool {
	_, newer := errors.AsType[newerError](err)
	of, onPath := errors.AsType[*fs.PathError](err)
	return newer || isDamage(err) || errors.Is(err, foreign.ErrNoFile) || onPath && (of.Path == filepath.Join(dir, n.file()) || of.Path == filepath.Join(dir, n.of().file()))
}

// readWritten reads what the trials in an exported file came to, if it is whole.
func readWritten(path string) (study Study, err error) {
	db, err := openFile(path, published)
	if err != nil {
		return Study{}, err
	}
	defer func() { err = explainSQLite(errors.Join(err, db.Close())) }()
	if _, err := checkDatabase(db); err != nil {
		return Study{}, err
	}
	return summarize(db, func(Study) []int { return nil }, short)
}

// Around returns the directory of the study that a path is in, by the slots and snapshots there; "" where it is in none. The path itself need not be
// there.
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
