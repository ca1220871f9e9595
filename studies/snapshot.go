package studies

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/foreign"
	"vllmtuner/studies/rights"
)

// Snapshots have a directory of their own. Their names have the epoch and the number of commits. No name is used twice.
// The highest name is the newest snapshot, because an owner that was superseded has a lower epoch.
const (
	snapshotDir = "snap"
	// currentFile has the name of the newest snapshot. It is overwritten in place. A reader on another NFS host sees
	// new content when it opens the file. It may see a new name in a directory a minute late.
	currentFile = snapshotDir + "/CURRENT"
)

// A snapshot is a base or a delta. A base is a whole database. A delta has the rows that came after a base. With
// deltas, a long study is not written again for each probe.
type snapshot struct {
	epoch   int64
	commits int64
	base    int64 // for a delta: commits of its base, which has the same epoch; -1 for a base
}

func (n snapshot) isBase() bool { return n.base < 0 }

// file is the snapshot's name in the study's directory.
func (n snapshot) file() string {
	if n.isBase() {
		return fmt.Sprintf("%s/%012d-%012d.db", snapshotDir, n.epoch, n.commits)
	}
	return fmt.Sprintf("%s/%012d-%012d-%012d.delta", snapshotDir, n.epoch, n.commits, n.base)
}

func (n snapshot) path(dir string) string { return filepath.Join(dir, n.file()) }

// baseSnapshot returns the base of a delta. For a base, it returns the base itself.
func (n snapshot) baseSnapshot() snapshot {
	if n.isBase() {
		return n
	}
	return snapshot{n.epoch, n.base, -1}
}

// asBase returns the base that has the same content as the snapshot n.
func (n snapshot) asBase() snapshot { return snapshot{n.epoch, n.commits, -1} }

// compare orders snapshots with the newest last. A base and a delta with the same commits have the same content.
func (n snapshot) compare(m snapshot) int {
	return cmp.Or(cmp.Compare(n.epoch, m.epoch), cmp.Compare(n.commits, m.commits), cmp.Compare(n.base, m.base))
}

var snapshotName = regexp.MustCompile(`^([0-9]{12})-([0-9]{12})(?:\.db|-([0-9]{12})\.delta)$`)

// parseSnapshot parses a file's name without its directory. The name may come from currentFile, which may be half
// written.
func parseSnapshot(name string) (n snapshot, ok bool) {
	m := snapshotName.FindStringSubmatch(name)
	if m == nil {
		return snapshot{}, false
	}
	number := func(text string) int64 { i, _ := strconv.ParseInt(text, 10, 64); return i } // twelve digits always fit
	n = snapshot{number(m[1]), number(m[2]), -1}
	if m[3] != "" {
		n.base = number(m[3])
	}
	return n, true
}

var errNone = errors.New("no snapshot")

// snapshots returns the snapshots in a study's directory, the newest first. If there are none, the error wraps errNone.
func snapshots(dir string) ([]snapshot, error) {
	entries, err := os.ReadDir(filepath.Join(dir, snapshotDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", dir, errNone)
	}
	if err != nil {
		return nil, err
	}
	current, err := readCurrent(dir)
	if err != nil {
		return nil, err
	}
	var all []snapshot
	for _, name := range append(fileNames(entries), strings.TrimPrefix(strings.TrimSpace(current), snapshotDir+"/")) {
		if n, ok := parseSnapshot(name); ok {
			all = append(all, n)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: %w", dir, errNone)
	}
	slices.SortFunc(all, func(a, b snapshot) int { return b.compare(a) })
	return slices.Compact(all), nil
}

// currentSize is how many bytes of currentFile are read. A correct file is shorter.
const currentSize = 512

// readCurrent returns the content of currentFile, or "" if that is missing or not a regular file. Then only the listing
// of the directory counts. The next run reports a file that is not regular.
func readCurrent(dir string) (string, error) {
	f, err := openRegular(filepath.Join(dir, currentFile))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, foreign.ErrNoFile) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	content, err := io.ReadAll(io.LimitReader(f, currentSize))
	return string(content), errors.Join(err, f.Close())
}

// openRegular opens a regular file for reading, and refuses anything else.
func openRegular(path string) (*os.File, error) {
	f, err := foreign.OpenRegular(os.O_RDONLY, func(flag int) (*os.File, error) { return os.OpenFile(path, flag, 0) })
	if errors.Is(err, foreign.ErrNoFile) {
		return nil, unusablef("open %s: %w", path, foreign.ErrNoFile)
	}
	return f, err
}

func fileNames(entries []os.DirEntry) (names []string) {
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// check returns an error if a file of a snapshot is missing or is no regular file. SQLite's error would say less, and
// opening a pipe would block.
func (n snapshot) check(dir string) error {
	for _, part := range []snapshot{n, n.baseSnapshot()} {
		info, err := os.Stat(part.path(dir))
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return unusablef("open %s: %w", part.path(dir), foreign.ErrNoFile)
		}
	}
	return nil
}

// write writes a snapshot to a path, as one database in the newest schema, and syncs the file. It copies the delta
// first, because copying the base takes long. Meanwhile the owner may publish three newer snapshots and remove this
// delta. After an error the file is useless.
func (n snapshot) write(ctx context.Context, dir, path string) (err error) {
	delta := path + ".delta"
	if !n.isBase() {
		defer func() {
			if removed := os.Remove(delta); !errors.Is(removed, fs.ErrNotExist) {
				err = errors.Join(err, removed)
			}
		}()
		if err := copyFile(ctx, n.path(dir), delta); err != nil {
			return err
		}
	}
	if err := copyFile(ctx, n.baseSnapshot().path(dir), path); err != nil {
		return err
	}
	_, err = inFile(path, scratchOptions, func(db *sql.DB) (any, error) {
		if !n.isBase() {
			if err := merge(db, delta); err != nil {
				return nil, err
			}
		}
		return nil, migrate(db)
	})
	if err != nil {
		return err
	}
	return syncPath(path)
}

func copyFile(ctx context.Context, from, to string) error {
	r, err := openRegular(from)
	if err != nil {
		return err
	}
	w, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, rights.File(filepath.Dir(to)))
	if err != nil {
		return errors.Join(err, r.Close())
	}
	_, err = io.Copy(w, readerFunc(func(into []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return r.Read(into)
	}))
	return errors.Join(err, w.Close(), r.Close())
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(into []byte) (int, error) { return f(into) }
