package weights

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/render"
)

const (
	// lockFile is locked by the process that copies into the folder. Its text names the process and its progress. The
	// file is never removed, because another process may have it open.
	lockFile = ".weights.lock"
	// partialPrefix begins the name of an incomplete copy. The holder of the lock may remove any incomplete copy.
	partialPrefix = ".partial-"
	// spareBytes is how many bytes a copy leaves free on the disk, because others write there too.
	spareBytes = 64 << 20
	// maxDepth limits how deep the folders of a model may nest, because links may form a circle.
	maxDepth = 8
)

// A copier makes copies. Tests may replace both fields.
type copier struct {
	stall time.Duration                   // how long another tuner may hold the lock without progress
	free  func(dir string) (int64, error) // returns the free bytes on the disk of a folder
}

// Copy copies a model's folder (weights, configuration, tokenizer) to a new folder inside parent, and returns the path
// of the new folder. Copy reuses an existing copy if the model's path, and the names, sizes and times of all files, are
// the same. It follows links, so a snapshot in the cache of the Hugging Face hub becomes a folder of files. It leaves
// out hidden files and the folder "original"; vLLM does not load them either.
//
// If another tuner copies into the same folder, Copy waits for it, as long as that tuner makes progress every two
// minutes. After an error, the end of ctx or a crash, an incomplete copy is removed, by the next Copy at the latest. A
// complete copy is never removed. Copy calls progress, and reacts to the end of ctx, as Warm does.
func Copy(ctx context.Context, model, parent string, progress func(done, total int64)) (path string, report Report, err error) {
	return copier{stall: 2 * time.Minute, free: freeBytes}.copy(ctx, model, parent, progress)
}

// CheckCopy returns an error if Copy could not begin: no copy can be made in the parent folder, or that folder has too
// little room. If an incomplete copy is there, CheckCopy does not check the room: only Copy can tell how much there
// will be.
func CheckCopy(model, parent string) error { return copier{free: freeBytes}.check(model, parent) }

func (c copier) check(model, parent string) error {
	wanted := parent
	source, err := openTree(model)
	if err == nil {
		parent, err = target(parent, source.dir)
	}
	if err == nil && !source.isAt(filepath.Join(parent, source.name())) {
		var left []string
		if left, err = incompleteCopies(parent); err == nil && len(left) == 0 {
			err = c.checkFree(parent, sum(source.files))
		}
	}
	if err != nil {
		return fmt.Errorf("copy the model %s to %s: %w", model, wanted, err)
	}
	return nil
}

func (c copier) copy(ctx context.Context, model, parent string, progress func(done, total int64)) (path string, report Report, err error) {
	began, wanted := time.Now(), parent
	defer func() {
		report.Took = time.Since(began)
		if err != nil {
			path, err = "", fmt.Errorf("copy the model %s to %s: %w", model, wanted, err)
		}
	}()
	report = Report{WasResident: -1, NowResident: -1}
	source, err := openTree(model)
	if err != nil {
		return "", report, err
	}
	report.Bytes = sum(source.files)
	if parent, err = target(parent, source.dir); err != nil {
		return "", report, err
	}
	path = filepath.Join(parent, source.name())
	const there = "a copy was already there"
	if source.isAt(path) {
		report.Skipped = there
		return path, report, nil
	}
	lock, err := c.lock(ctx, filepath.Join(parent, lockFile))
	if err != nil {
		return "", report, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // Close releases the lock
	if source.isAt(path) {
		report.Skipped = there + ", made by another tuner meanwhile"
		return path, report, nil
	}
	if err := removeLeft(parent); err != nil {
		return "", report, err
	}
	if err := c.checkFree(parent, report.Bytes); err != nil {
		return "", report, err
	}
	say(lock, source.dir, 0, report.Bytes)
	err = source.copyTo(ctx, path, &tally{total: report.Bytes, tell: func(done, total int64) {
		report.Read = done
		say(lock, source.dir, done, total)
		if progress != nil {
			progress(done, total)
		}
	}})
	return path, report, err
}

// target makes the folder for copies. It refuses a folder inside the model's own.
func target(parent, model string) (string, error) {
	errWithin := errors.New("the copy would be inside the model's own folder; choose another folder")
	within := func(dir string) bool {
		rest, err := filepath.Rel(model, dir)
		return err == nil && filepath.IsLocal(rest)
	}
	if plain, err := filepath.Abs(parent); err == nil && within(plain) { // the path is checked before anything is made there
		return "", errWithin
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", err
	}
	parent, err := resolve(parent)
	if err != nil {
		return "", err
	}
	if within(parent) { // the path leads into the model's folder by a link
		return "", errWithin
	}
	return parent, nil
}

// resolve returns the absolute path of a folder, in which no part is a link.
func resolve(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// A tree is a model's folder with all files that are copied.
type tree struct {
	dir   string // absolute path without links
	files []File // paths are relative to dir
	key   string // hash of all names, sizes and times
}

func openTree(model string) (*tree, error) {
	dir, err := resolve(model)
	if err != nil {
		return nil, err
	}
	t := &tree{dir: dir}
	hash := sha256.New()
	fmt.Fprintf(hash, "%q\n", dir)
	if err := t.list(".", hash, maxDepth); err != nil {
		return nil, err
	}
	if len(t.files) == 0 {
		return nil, errors.New("the folder holds no files")
	}
	t.key = hex.EncodeToString(hash.Sum(nil))[:16]
	return t, nil
}

// list adds the files below a folder of the tree, in the order of their names.
func (t *tree) list(within string, hash io.Writer, depth int) error {
	if depth == 0 {
		return fmt.Errorf("%s: its folders are nested too deep, or links form a circle", filepath.Join(t.dir, within))
	}
	entries, err := os.ReadDir(filepath.Join(t.dir, within))
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(within, e.Name())
		// vLLM ignores "original/**/*" (LoadConfig.ignore_patterns of 0.14.1). Meta puts its own checkpoints there,
		// which are as large as the weights.
		if strings.HasPrefix(e.Name(), ".") || name == "original" {
			continue
		}
		info, err := os.Stat(filepath.Join(t.dir, name)) // Stat follows links
		if err != nil {
			return err
		}
		switch {
		case info.IsDir():
			if err := t.list(name, hash, depth-1); err != nil {
				return err
			}
		case info.Mode().IsRegular():
			t.files = append(t.files, File{name, info.Size()})
			fmt.Fprintf(hash, "%q %d %d\n", name, info.Size(), info.ModTime().UnixNano())
		default:
			return fmt.Errorf("%s is neither a file nor a folder", filepath.Join(t.dir, name))
		}
	}
	return nil
}

// name returns the folder name for a copy of the tree: a title for people, and the key. The title of a snapshot is the
// name of its model's folder, because the snapshot's own folder has only a commit as its name.
func (t *tree) name() string { return t.title() + "-" + t.key }

func (t *tree) title() string {
	if parent := filepath.Dir(t.dir); filepath.Base(parent) == "snapshots" {
		return filepath.Base(filepath.Dir(parent))
	}
	return filepath.Base(t.dir)
}

// isAt reports whether a complete copy is in a folder. A copy gets its final name only when it is complete. So isAt
// looks only for files that somebody deleted or cut short later.
func (t *tree) isAt(dir string) bool {
	for _, f := range t.files {
		info, err := os.Stat(filepath.Join(dir, f.Path))
		if err != nil || !info.Mode().IsRegular() || info.Size() != f.Size {
			return false
		}
	}
	return true
}

// copyTo makes a copy at the path. The caller holds the lock.
func (t *tree) copyTo(ctx context.Context, path string, done *tally) (err error) {
	temp := filepath.Join(filepath.Dir(path), partialPrefix+filepath.Base(path))
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(temp))
		}
	}()
	if err := t.makeFiles(temp); err != nil {
		return err
	}
	err = inParallel(ctx, segments(t.files), func(ctx context.Context, s segment, buffer []byte) error {
		name := t.files[s.file].Path
		return copySegment(ctx, filepath.Join(t.dir, name), filepath.Join(temp, name), s, buffer, done)
	})
	if err != nil {
		return err
	}
	now, err := openTree(t.dir)
	if err != nil {
		return err
	}
	if now.key != t.key {
		return errors.New("the model changed during the copy; run again when its files are complete")
	}
	if err := syncTree(temp); err != nil {
		return err
	}
	if err := os.RemoveAll(path); err != nil { // path may hold an earlier copy, which has lost files
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	return syncPath(filepath.Dir(path))
}

// makeFiles makes all files of the tree in a folder, without content.
func (t *tree) makeFiles(dir string) error {
	for _, f := range t.files {
		path := filepath.Join(dir, f.Path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, nil, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// copySegment copies a segment to the same place in another file, which must exist, and syncs the copy to disk. A
// single sync at the end would have to write all dirty pages of a large memory, and nothing could interrupt it.
func copySegment(ctx context.Context, from, to string, s segment, buffer []byte, done *tally) (err error) {
	f, err := os.OpenFile(to, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	err = read(ctx, from, s, buffer, func(block []byte, offset int64) error {
		if _, err := f.WriteAt(block, offset); err != nil {
			return err
		}
		done.add(int64(len(block)))
		return nil
	})
	if err != nil {
		return err
	}
	if err := unix.Fdatasync(int(f.Fd())); err != nil {
		return fmt.Errorf("sync %s: %w", to, err)
	}
	return nil
}

// syncTree waits until all files and names below a folder are on disk.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, syncPath(path))
	})
}

// syncPath waits until a file's data, or a directory's names, are on disk.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// incompleteCopies returns the paths of the incomplete copies in a folder.
func incompleteCopies(dir string) (paths []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), partialPrefix) {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, err
}

// removeLeft removes incomplete copies. The caller holds the lock, so nobody is working on them.
func removeLeft(dir string) error {
	paths, err := incompleteCopies(dir)
	for _, path := range paths {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove an incomplete copy: %w", err)
		}
	}
	return err
}

// checkFree fails when a copy would not fit, and names the other copies in the folder.
func (c copier) checkFree(dir string, bytes int64) error {
	free, err := c.free(dir)
	if err != nil {
		return err
	}
	if free >= bytes+spareBytes {
		return nil
	}
	err = fmt.Errorf("the copy takes %s and must leave %s free, but only %s are free", render.Bytes(bytes), render.Bytes(spareBytes), render.Bytes(free))
	entries, readErr := os.ReadDir(dir)
	if readErr != nil {
		return errors.Join(err, readErr)
	}
	var others []string
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			others = append(others, e.Name())
		}
	}
	if len(others) > 0 {
		return fmt.Errorf("%w; remove copies that you no longer need (%s), or choose another folder", err, strings.Join(others, ", "))
	}
	return fmt.Errorf("%w; make room, or choose another folder", err)
}

// freeBytes returns how many bytes may be written to the file system of a folder.
func freeBytes(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("get the free space of %s: %w", dir, err)
	}
	return int64(s.Bavail) * int64(s.Bsize), nil
}

// lock waits for the lock of a folder, until ctx ends or the holder stops making progress. The lock is held until the
// file is closed or the process is gone.
func (c copier) lock(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if err := c.wait(ctx, f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (c copier) wait(ctx context.Context, f *os.File) error {
	const pollEvery = 100 * time.Millisecond
	var said []byte
	moved := time.Now()
	for {
		// We use flock, not fcntl. A lock of flock belongs to the open file. So the lock is not released when this
		// process opens and closes the file once more.
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		says, err := io.ReadAll(io.NewSectionReader(f, 0, 4<<10))
		if err != nil {
			return err
		}
		if !slices.Equal(says, said) {
			said, moved = says, time.Now()
		}
		if time.Since(moved) > c.stall {
			return fmt.Errorf("another tuner has held %s for %s without progress: %s; end it, or choose another folder",
				f.Name(), render.Took(c.stall), strings.TrimSpace(string(said)))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for another tuner's copy: %w", context.Cause(ctx))
		case <-time.After(pollEvery):
		}
	}
}

// say writes into the lock file who copies what, and how far the copy is. Waiting tuners read this. It ignores an
// error: the other tuners then only wait without news.
func say(lock *os.File, model string, done, total int64) {
	host, err := os.Hostname()
	if err != nil {
		host = "an unknown host"
	}
	text := fmt.Sprintf("pid %d on %s has copied %d of %d bytes of %s\n", os.Getpid(), host, done, total, model)
	if _, err := lock.WriteAt([]byte(text), 0); err == nil {
		_ = lock.Truncate(int64(len(text))) // cuts off the rest of a longer text that the last holder wrote
	}
}
