package studies

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"vllmtuner/foreign"
	"vllmtuner/studies/rights"
)

// Snapshots have a directory of their own. Their names have the epoch and the number of commits. A name is used once.
// The highest name is the newest snapshot, because a superseded owner has a lower epoch.
const (
	snapshotDir = "snap"
	// currentFile names the newest snapshot. It is written in place: a reader on another NFS host sees new content when
	// it opens a file, but new names in a directory up to a minute later.
	currentFile = snapshotDir + "/CURRENT"
)

// A snapshot is a base, a whole database, or a delta, the rows after a base. With deltas a long study is not written
// again for each probe.
type snapshot struct {
	epoch   int64
	commits int64
	base    int64 // commits of a delta's base, which has the same epoch; -1 for a base
}

func (n snapshot) isBase() bool { return n.base < 0 }

// file is the snapshot's name in the study's directory.
func (n snapshot) file() string {
	if n.isBase() {
		return fmt.Sprintf("%s/%012d-%012d.db", snapshotDir, n.epoch, n.commits)
	}
	return fmt.Sprintf("%s/%012d-%012d-%012d.delta", snapshotDir, n.epoch, n.commits, n.base)
}

// of returns the base of a delta. For a base it returns the base.
func (n snapshot) of() snapshot {
	if n.isBase() {
		return n
	}
	return snapshot{n.epoch, n.base, -1}
}

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

// snapshots returns the snapshots in a study's directory, the newest first; errNone when there are none.
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

// currentSize is how many bytes of currentFile are read. It never has more.
const currentSize = 512

// readCurrent returns the content of currentFile, or "" if that is no regular file. Then only the listing counts. The
// next run reports it.
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

// open opens a snapshot as one database.
func (n snapshot) open(dir string) (db *sql.DB, err error) {
	for _, part := range []snapshot{n, n.of()} { // because SQLite's error for a missing file says less
		info, err := os.Stat(filepath.Join(dir, part.file()))
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() { // to open a pipe would block
			return nil, unusablef("open %s: %w", filepath.Join(dir, part.file()), foreign.ErrNoFile)
		}
	}
	if db, err = openFile(filepath.Join(dir, n.of().file()), published); err != nil || n.isBase() {
		return db, err
	}
	if err := n.join(dir, db); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return db, nil
}

// join adds a delta to the opened database of its base.
func (n snapshot) join(dir string, db *sql.DB) error {
	version, err := schemaVersion(db)
	switch {
	case err != nil:
		return err
	case version > len(migrations): // its tables are unknown
		return newerError{version}
	}
	views := joined
	if version >= hasChanges {
		views += joinedChanges
	}
	if err := attach(db, filepath.Join(dir, n.file())); err != nil {
		return err
	}
	_, err = db.Exec(views + "PRAGMA query_only=1")
	return err
}

// attach attaches a delta to the database of its base.
func attach(db *sql.DB, delta string) error {
	path, err := filepath.Abs(delta)
	if err != nil {
		return err
	}
	name := url.URL{Scheme: "file", OmitHost: true, Path: path, RawQuery: published}
	if _, err = db.Exec(`ATTACH ? AS delta`, name.String()); err != nil {
		return fmt.Errorf("attach the delta to its base: %w", err)
	}
	return nil
}

// write writes a snapshot as one database to a path, and syncs it.
func (n snapshot) write(ctx context.Context, dir, path string) (err error) {
	return n.writeWith(ctx, dir, filepath.Join(dir, n.file()), path)
}

// writeWith is write with the path of the delta, if n is one.
func (n snapshot) writeWith(ctx context.Context, dir, delta, path string) (err error) {
	if err := copyFile(ctx, filepath.Join(dir, n.of().file()), path); err != nil {
		return err
	}
	if !n.isBase() {
		if err := merge(path, delta); err != nil {
			return err
		}
	}
	return syncPath(path)
}

// writeNewest is write in the newest schema. It copies the delta first: while it copies the base, the owner may publish
// three newer snapshots and remove this one.
func (n snapshot) writeNewest(ctx context.Context, dir, path string) (err error) {
	delta := path + ".delta"
	if !n.isBase() {
		defer func() {
			if removed := os.Remove(delta); !errors.Is(removed, fs.ErrNotExist) {
				err = errors.Join(err, removed)
			}
		}()
		if err := copyFile(ctx, filepath.Join(dir, n.file()), delta); err != nil {
			return err
		}
	}
	if err := n.writeWith(ctx, dir, delta, path); err != nil {
		return err
	}
	if err := renew(path); err != nil {
		return err
	}
	return syncPath(path)
}

// renew converts a copy to the newest schema.
func renew(path string) error {
	db, err := openFile(path, scratch)
	if err != nil {
		return err
	}
	return errors.Join(migrate(db), db.Close())
}

// merge adds a delta to a copy of its base. After an error the copy is useless.
func merge(path, delta string) (err error) {
	db, err := openFile(path, scratch)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	version, err := schemaVersion(db)
	if err != nil {
		return err
	}
	statements := merged
	if version >= hasChanges {
		statements += mergedChanges
	}
	if err := attach(db, delta); err != nil {
		return err
	}
	if err := transact(db, func(tx *transaction) error { tx.exec(statements); return nil }); err != nil {
		return fmt.Errorf("merge the delta into its base: %w", err)
	}
	_, err = db.Exec(`DETACH delta`)
	return err
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
