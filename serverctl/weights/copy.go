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
)

const (
	// lockFile is held by whoever copies into its folder, and says who that is and how far. It is never removed: another
	// may have it open.
	lockFile = ".weights.lock"
	// partial begins the name of a copy that is not complete. Whoever holds the lock may remove any of them.
	partial = ".partial-"
	// spare is what is left free on a disk beside a copy, in bytes: others write there too.
	spare = 64 << 20
	// deepest is how many folders a model's may hold within each other; links may lead in a circle.
	deepest = 8
)

// A copier makes copies with the waits and the disk that a test may shorten.
type copier struct {
	stall time.Duration                   // another tuner's copy may make no progress for so long
	free  func(dir string) (int64, error) // bytes
}

// Copy copies a model's folder (weights, configuration, tokenizer) into a folder of its own below to, and returns that. A copy of
// the same files, by the path of the model, their names, sizes and times, is used again. Links are followed, so a snapshot in
// the cache of the Hugging Face hub becomes a folder of files. What vLLM does not load either is left out: hidden files,
// and the folder original.
//
// Where another tuner copies into to, Copy waits for it as long as that makes progress in each two minutes. A copy that was
// ended, by an error, the end of ctx or a crash, is removed, at the latest by the next Copy; a complete one never is.
// progress and ctx are as in Warm.
func Copy(ctx context.Context, model, to string, progress func(done, total int64)) (path string, report Report, err error) {
	return copier{stall: 2 * time.Minute, free: freeBytes}.copy(ctx, model, to, progress)
}

// CheckCopy returns why Copy could not begin: the folder is no place for a copy, or has too little room. Where a copy is being made, or was left
// half made, only Copy can tell what room there will be.
func CheckCopy(model, to string) error { return copier{free: freeBytes}.check(model, to) }

func (c copier) check(model, to string) error {
	wanted := to
	source, err := openTree(model)
	if err == nil {
		to, err = target(to, source.dir)
	}
	if err == nil && !source.isAt(filepath.Join(to, source.name())) {
		var halves []string
		if halves, err = filepath.Glob(filepath.Join(to, partial+"*")); err == nil && len(halves) == 0 {
			err = c.checkFree(to, sum(source.files))
		}
	}
	if err != nil {
		return fmt.Errorf("copy the model %s to %s: %w", model, wanted, err)
	}
	return nil
}

func (c copier) copy(ctx context.Context, model, to string, progress func(done, total int64)) (path string, report Report, err error) {
	began, wanted := time.Now(), to
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
	if to, err = target(to, source.dir); err != nil {
		return "", report, err
	}
	path = filepath.Join(to, source.name())
	const there = "a copy was there"
	if source.isAt(path) {
		report.Skipped = there
		return path, report, nil
	}
	lock, err := c.lock(ctx, filepath.Join(to, lockFile))
	if err != nil {
		return "", report, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // which lets go of it
	if source.isAt(path) {
		report.Skipped = there + ", made by another tuner meanwhile"
		return path, report, nil
	}
	if err := removeLeft(to); err != nil {
		return "", report, err
	}
	if err := c.checkFree(to, report.Bytes); err != nil {
		return "", report, err
	}
	lock.say(source.dir, 0, report.Bytes)
	err = source.copyTo(ctx, path, &tally{total: report.Bytes, tell: func(done, total int64) {
		report.Read = done
		lock.say(source.dir, done, total)
		if progress != nil {
			progress(done, total)
		}
	}})
	return path, report, err
}

// target makes the folder for copies, and refuses one within the model's.
func target(to, model string) (string, error) {
	errWithin := errors.New("the copy would lie within the model's own folder; choose another one")
	within := func(dir string) bool {
		rest, err := filepath.Rel(model, dir)
		return err == nil && filepath.IsLocal(rest)
	}
	if plain, err := filepath.Abs(to); err == nil && within(plain) { // before anything is made there
		return "", errWithin
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return "", err
	}
	to, err := resolve(to)
	if err != nil {
		return "", err
	}
	if within(to) { // by a link
		return "", errWithin
	}
	return to, nil
}

// resolve returns the path of a folder without links.
func resolve(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// A tree is a model's folder with everything that is copied of it.
type tree struct {
	dir   string // without links
	files []File // paths are within dir
	key   string // of all names, sizes and times
}

func openTree(model string) (*tree, error) {
	dir, err := resolve(model)
	if err != nil {
		return nil, err
	}
	t := &tree{dir: dir}
	hash := sha256.New()
	fmt.Fprintf(hash, "%q\n", dir)
	if err := t.list(".", hash, deepest); err != nil {
		return nil, err
	}
	if len(t.files) == 0 {
		return nil, errors.New("the folder holds no files")
	}
	t.key = hex.EncodeToString(hash.Sum(nil))[:16]
	return t, nil
}

// list adds the files below a folder of the tree. Their order is that of their names.
func (t *tree) list(within string, hash io.Writer, depth int) error {
	if depth == 0 {
		return fmt.Errorf("%s: folders lie too deep within each other, or links lead in a circle", filepath.Join(t.dir, within))
	}
	entries, err := os.ReadDir(filepath.Join(t.dir, within))
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(within, e.Name())
		// "original/**/*" is what vLLM ignores (LoadConfig.ignore_patterns of 0.14.1): Meta's checkpoints, as large again.
		if strings.HasPrefix(e.Name(), ".") || name == "original" {
			continue
		}
		info, err := os.Stat(filepath.Join(t.dir, name)) // of what a link leads to
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

// name is that of the tree's copy: what people know it by, and its key. The folder of a snapshot is named for a commit only.
func (t *tree) name() string { return t.title() + "-" + t.key }

func (t *tree) title() string {
	if parent := filepath.Dir(t.dir); filepath.Base(parent) == "snapshots" {
		return filepath.Base(filepath.Dir(parent))
	}
	return filepath.Base(t.dir)
}

// isAt reports whether a complete copy is in a folder. It is renamed to its name when it is complete, so this finds what
// somebody deleted from it.
func (t *tree) isAt(dir string) bool {
	for _, f := range t.files {
		info, err := os.Stat(filepath.Join(dir, f.Path))
		if err != nil || !info.Mode().IsRegular() || info.Size() != f.Size {
			return false
		}
	}
	return true
}

// copyTo makes a copy with that path. The caller holds the lock.
func (t *tree) copyTo(ctx context.Context, path string, done *tally) (err error) {
	temp := filepath.Join(filepath.Dir(path), partial+filepath.Base(path))
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
		return errors.New("the model changed while it was copied; start again when it is complete")
	}
	if err := syncTree(temp); err != nil {
		return err
	}
	if err := os.RemoveAll(path); err != nil { // a copy of which something was deleted
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	return syncPath(filepath.Dir(path))
}

// makeFiles makes the tree's files in a folder, empty.
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

// copySegment copies a stretch of a file to the same place in another, which exists. It is on the disk when copySegment returns:
// else the last sync would wait for all of a large memory's dirty pages, and could not be ended.
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

// syncTree waits until all files and names below a folder are on the disk.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, syncPath(path))
	})
}

// syncPath waits until a file's data, or a directory's names, are on the disk.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// removeLeft removes copies that were not completed. The caller holds the lock, so nobody is at work on them.
func removeLeft(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), partial) {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return fmt.Errorf("remove a copy that was not completed: %w", err)
		}
	}
	return nil
}

// checkFree says no when a copy would not fit, and what else lies there.
func (c copier) checkFree(dir string, bytes int64) error {
	free, err := c.free(dir)
	if err != nil {
		return err
	}
	if free >= bytes+spare {
		return nil
	}
	err = fmt.Errorf("it takes %s and %s to spare, and %s are free", sizeText(bytes), sizeText(spare), sizeText(free))
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
		return fmt.Errorf("%w; remove what is needed no more of %s, or choose another folder", err, strings.Join(others, ", "))
	}
	return fmt.Errorf("%w; make room, or choose another folder", err)
}

// freeBytes is what may be written to the file system of a folder.
func freeBytes(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	return int64(s.Bavail) * int64(s.Bsize), nil
}

// A lock is held until it is closed, or the process is gone.
type lock struct{ *os.File }

// lock waits for the lock of a folder: while whoever has it makes progress, and until ctx ends.
func (c copier) lock(ctx context.Context, path string) (lock, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return lock{}, err
	}
	if err := c.wait(ctx, f); err != nil {
		return lock{}, errors.Join(err, f.Close())
	}
	return lock{f}, nil
}

func (c copier) wait(ctx context.Context, f *os.File) error {
	const pollEvery = 100 * time.Millisecond
	var said []byte
	moved := time.Now()
	for {
		// flock and not fcntl: it belongs to the open file, so that no other open and close of it in this process can lose it.
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
				f.Name(), c.stall, strings.TrimSpace(string(said)))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for another tuner's copy: %w", context.Cause(ctx))
		case <-time.After(pollEvery):
		}
	}
}

// say tells those who wait who copies what, and how far. What it cannot tell only makes them impatient.
func (l lock) say(model string, done, total int64) {
	host, err := os.Hostname()
	if err != nil {
		host = "an unknown host"
	}
	text := fmt.Sprintf("pid %d on %s has copied %d of %d bytes of %s\n", os.Getpid(), host, done, total, model)
	if _, err := l.WriteAt([]byte(text), 0); err == nil {
		_ = l.Truncate(int64(len(text))) // of the last holder's longer text
	}
}
