package studies

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vllmtuner/studies/fence"
)

// minFree is what must be free on the study's disk before GPU time is spent, in bytes. A probe takes about 1.5 kB, so a
// study of a thousand trials with five probes each takes 8 MiB, its snapshot as much again, and so does the next one while
// it is made.
const minFree = 64 << 20

// prepare makes the study's directory, and checks that it can be written, has space, and is on a disk that keeps what it is given.
func prepare(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the study's directory: %w", err)
	}
	_, err := ExamineDisk(dir)
	return err
}

// A Disk is what a study would be kept on.
type Disk struct {
	Mount    fence.Mount
	Commit   time.Duration // that a small write takes until it is on the disk, median of five
	Warnings []string      // what a user should know of it
}

// Owners says by what a study's owner is known to be gone.
func (d Disk) Owners() string {
	switch d.Mount.Locks() {
	case fence.CertainLocks:
		return "a killed run is taken over at once"
	case fence.SharedLocks:
		return "shared: a killed run is taken over after a second, one that was cut off after --takeover-after"
	}
	return "shared, without locks: a killed run is taken over after --takeover-after"
}

// ExamineDisk says what a study in the directory would be kept on. It is an error when it could not: when nothing can be written and synced
// there, files can be made that are there already, less than 64 MiB are free, or it is mounted so that it loses what it was given. Of a directory
// that does not exist yet, the nearest one above it is looked at. Nothing is left behind.
func ExamineDisk(dir string) (d Disk, err error) {
	if dir, err = filepath.Abs(dir); err != nil {
		return d, err
	}
	for {
		info, err := os.Stat(dir)
		if err == nil && !info.IsDir() {
			return d, fmt.Errorf("%s is a file, not a directory for studies", dir)
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == filepath.Dir(dir) {
			break // it exists, or the write says what is wrong with it
		}
		dir = filepath.Dir(dir)
	}
	if d.Commit, err = checkWrite(dir); err != nil {
		return d, fmt.Errorf("%s cannot be written: %w", dir, err)
	}
	if d.Mount, err = fence.MountOf(dir); err != nil {
		return d, err
	}
	if d.Warnings, err = d.Mount.Check(); err != nil {
		return d, err
	}
	return d, checkFree(dir)
}

// takeLock takes the lock or says who has it. flock and not fcntl: it belongs to the open file, so that no other open and
// close of the same file in this process can lose it.
func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("the study's directory cannot be written: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		owner, readErr := io.ReadAll(io.LimitReader(f, 1000))
		text := strings.TrimSpace(string(owner))
		if text == "" {
			text = "it has not yet said who it is"
		}
		return nil, errors.Join(fmt.Errorf("%w: %s (%s)", ErrOwned, text, path), readErr, f.Close())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w; the study needs a disk with working locks", path, err), f.Close())
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, thisOwner().String()+"\n")); err != nil {
		return nil, errors.Join(fmt.Errorf("write %s: %w", path, err), f.Close())
	}
	return f, nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// checkWrite writes a few kilobytes and waits until they are on the disk, five times, of which it returns the median: a full or read-only disk is to be
// found before GPU time is spent. It sees to it that a file that is there cannot be made: on that rests whose a study is.
func checkWrite(dir string) (took time.Duration, err error) {
	f, err := os.CreateTemp(dir, "write-check-*.tmp")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(f.Name())) }()
	again, err := os.OpenFile(f.Name(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err == nil {
		return 0, errors.Join(errors.New("the disk makes a file that is there already (O_EXCL): two tuners could both own a study"), again.Close())
	}
	if !errors.Is(err, fs.ErrExist) {
		return 0, err
	}
	var all []time.Duration
	for range 5 {
		began := time.Now()
		if _, err := f.Write(make([]byte, 16<<10)); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		all = append(all, time.Since(began))
	}
	return median(all), nil
}

// checkFree says no when the disk has less than minFree left for us.
func checkFree(dir string) error {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	if free := uint64(s.Bavail) * uint64(s.Bsize); free < minFree {
		return fmt.Errorf("%s has only %d bytes (%d MiB) free, a study needs %d MiB: make room or use another --root",
			dir, free, free>>20, minFree>>20)
	}
	return nil
}

// syncPath waits until a file's data, or a directory's names, are on the disk.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Lock makes a directory that one process at a time may use, such as that of a sweep's servers, and takes its lock, which holds
// until it is closed or the process is gone. It returns ErrOwned when another has it.
func Lock(dir string) (io.Closer, error) {
	if err := prepare(dir); err != nil {
		return nil, err
	}
	return takeLock(filepath.Join(dir, "lock"))
}
